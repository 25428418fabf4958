-- Counters of waiting work. Changes are summed over the whole call and written once
-- by save_load; a field that reaches zero is deleted, so the hash stays small. What is
-- delayed or retrying is counted apart, under `later:`: it takes room, and is before
-- nobody.
local SHADOW = 'tokenmill.shadow' -- owns copies of jobs, which are before nobody
local RATE_WINDOW_MS = 10000 -- drained work is forgotten with this time constant
local load_change = {}
local drained_jobs, drained_tokens = 0, 0

local function bump(field, by)
  load_change[field] = (load_change[field] or 0) + by
end

-- Tokens or bytes as a record names them; what cannot be a size, as a stranger may have
-- written, counts nothing rather than ending the call half-way.
local function size_of(number)
  local size = tonumber(number) or 0
  return size >= 0 and size <= 1e9 and math.floor(size) or 0
end

-- One job starts (sign 1) or stops (sign -1) waiting: its class, tenant, tokens, bytes.
-- `head` is LATER for one that waits for its time. A copy counts as its owner's alone.
local LATER = 'later:'
local function count_waiting(job, sign, head)
  head = head or ''
  local tokens = sign * size_of(job.tokens)
  if job.tenant ~= SHADOW then
    bump(head .. 'jobs', sign)
    bump(head .. 'tokens', tokens)
    bump(head .. 'bytes', sign * size_of(job.bytes))
    bump(head .. 'class:' .. job.class .. ':jobs', sign)
    bump(head .. 'class:' .. job.class .. ':tokens', tokens)
  end
  bump(head .. 'tenant:' .. job.tenant .. ':jobs', sign)
  bump(head .. 'tenant:' .. job.tenant .. ':tokens', tokens)
end

-- A queued job stops waiting and so made room: this feeds the measured drain rate. One
-- that leaves before its time says nothing of it.
local function count_drained(job)
  if job.state == 'delayed' or job.state == 'retrying' then
    return count_waiting(job, -1, LATER)
  end
  count_waiting(job, -1)
  if job.tenant == SHADOW then
    return
  end
  drained_jobs = drained_jobs + 1
  drained_tokens = drained_tokens + size_of(job.tokens)
end

local function decay(value, since, now)
  local age = math.max(now - (tonumber(since) or now), 0)
  return (tonumber(value) or 0) * math.exp(-age / RATE_WINDOW_MS)
end

-- Milliseconds, of those that are remembered, during which something waited: while
-- nothing does, a low rate says nothing of what could be drained.
local function busy_ms(value, since, from, now)
  local open = from and math.max(now - (tonumber(from) or now), 0) or 0
  local part = 1 - math.exp(-open / RATE_WINDOW_MS)
  return decay(value, since, now) + RATE_WINDOW_MS * part
end

local function save_drained(key, now)
  local rate = redis.call(
    'HMGET', key, 'rate_jobs', 'rate_tokens', 'rate_busy', 'rate_ms', 'rate_from'
  )
  redis.call('HINCRBY', key, 'drained_tokens', drained_tokens)
  redis.call(
    'HSET', key,
    'rate_jobs', string.format('%.3f', decay(rate[1], rate[4], now) + drained_jobs),
    'rate_tokens', string.format('%.3f', decay(rate[2], rate[4], now) + drained_tokens),
    'rate_busy', string.format('%.3f', busy_ms(rate[3], rate[4], rate[5], now)),
    'rate_ms', now, 'rate_from', now
  )
end

-- Whoever counts less than we do, as the former release, leaves something over; without
-- a job there is nothing to count.
local function clear_left_over(key)
  local left = redis.call('HMGET', key, 'tokens', 'bytes', 'tenants')
  if not (left[1] or left[2] or left[3]) then
    return
  end
  for _, field in ipairs(redis.call('HKEYS', key)) do
    local name = string.match(field, '^(%a+)')
    if name == 'tokens' or name == 'bytes' or name == 'tenants' or name == 'class'
      or name == 'tenant' then
      redis.call('HDEL', key, field)
    end
  end
end

local function save_load(key, now)
  local tenants, first, none = 0, false, false
  for field, by in pairs(load_change) do
    local left = by ~= 0 and redis.pcall('HINCRBY', key, field, by)
    if left and (type(left) == 'table' or left <= 0) then
      redis.call('HDEL', key, field) -- nothing waits, or a stranger wrote no number
      left = 0
    end
    if left and field == 'jobs' then
      first, none = left == by, left == 0
    elseif left and field ~= 'tenant:' .. SHADOW .. ':jobs'
      and string.find(field, '^tenant:.*:jobs$') then
      tenants = tenants + (left == by and 1 or left == 0 and -1 or 0)
    end
  end
  if tenants ~= 0 and redis.call('HINCRBY', key, 'tenants', tenants) <= 0 then
    redis.call('HDEL', key, 'tenants')
  end
  if drained_jobs > 0 then
    save_drained(key, now)
  end
  if first then
    redis.call('HSET', key, 'rate_from', now)
  elseif none then
    redis.call('HDEL', key, 'rate_from')
    clear_left_over(key)
  end
end
