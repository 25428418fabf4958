-- Counters of waiting work. Changes are summed over the whole call and written once
-- by save_load; a field that reaches zero is deleted, so the hash stays small.
local RATE_WINDOW_MS = 10000 -- drained work is forgotten with this time constant
local load_change = {}
local drained_jobs, drained_tokens = 0, 0

local function bump(field, by)
  load_change[field] = (load_change[field] or 0) + by
end

-- Tokens as a record names them; what cannot be a size, as a stranger may have written,
-- counts nothing rather than ending the call half-way.
local function size_of(tokens)
  local size = tonumber(tokens) or 0
  return size >= 0 and size <= 1e9 and math.floor(size) or 0
end

-- One job starts (sign 1) or stops (sign -1) waiting.
local function count_waiting(class, tenant, tokens, sign)
  tokens = sign * size_of(tokens)
  bump('jobs', sign)
  bump('tokens', tokens)
  bump('class:' .. class .. ':jobs', sign)
  bump('tenant:' .. tenant .. ':jobs', sign)
  bump('tenant:' .. tenant .. ':tokens', tokens)
end

-- One job stops waiting and so made room: this feeds the measured drain rate.
local function count_drained(class, tenant, tokens)
  count_waiting(class, tenant, tokens, -1)
  drained_jobs = drained_jobs + 1
  drained_tokens = drained_tokens + size_of(tokens)
end

local function decay(value, since, now)
  local age = math.max(now - (tonumber(since) or now), 0)
  return (tonumber(value) or 0) * math.exp(-age / RATE_WINDOW_MS)
end

local function save_load(key, now)
  for field, by in pairs(load_change) do
    local left = by ~= 0 and redis.pcall('HINCRBY', key, field, by)
    if left and (type(left) == 'table' or left <= 0) then
      redis.call('HDEL', key, field) -- nothing waits, or a stranger wrote no number
    end
  end
  if drained_jobs > 0 then
    local rate = redis.call('HMGET', key, 'rate_jobs', 'rate_tokens', 'rate_ms')
    redis.call('HINCRBY', key, 'drained_tokens', drained_tokens)
    redis.call(
      'HSET', key,
      'rate_jobs', string.format('%.3f', decay(rate[1], rate[3], now) + drained_jobs),
      'rate_tokens', string.format('%.3f', decay(rate[2], rate[3], now) + drained_tokens),
      'rate_ms', now
    )
  end
end
