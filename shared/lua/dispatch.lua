-- dispatch: the active scheduler promises queued jobs to one worker group.
--
-- KEYS 1 scheduler  hash    fence of the active scheduler
--      2 load       hash    counters of waiting work
--      3 lanes      zset    lanes with waiting entries
--      4 lease      zset    job id -> ms at which its lease ends
--      5 group      hash    the group's credit
--      6 work       stream  what the group reads
--      7 resume     stream  redelivered jobs
--      then three for each job: job:<id> hash, ids:<id> string, and the stream that
--      holds its entry now (its lane or `resume`)
-- ARGV 1 fence, 2 group, 3 batch, 4 lease in ms, 5 number of jobs; then seven for each:
--      id, exact prompt tokens, token ids (little-endian int32), KV blocks to reserve,
--      bucket by exact length, stream id of its entry where known, or '', choices
--      (each takes a running slot and prefills the prompt)
-- Returns two for each job: status and epoch (0 unless dispatched).
--      dispatched  the group has it (also when this very call is repeated)
--      moved       its entry is in another stream than the one given: ask again
--      gone, cancelled, expired, no_credit, fenced
--include clock
--include record
--include load
--include lanes
local HEAD, WIDTH, KEYS_HEAD, KEYS_WIDTH = 5, 7, 7, 3
local WORK_KEEP_MS = 3600000 -- a work stream nobody fills any more goes by itself
local FIELDS = {
  'state', 'epoch', 'owner', 'batch', 'deadline', 'tokens', 'class', 'tenant',
  'entry', 'entry_key', 'bucket', 'lane',
}
local group, batch, count = ARGV[2], ARGV[3], tonumber(ARGV[5])
local now, replies, lanes, leases = now_ms(), {}, {}, {}
local until_ms = now + tonumber(ARGV[4])
local credit = redis.call(
  'HMGET', KEYS[5], 'credit_blocks', 'credit_running', 'credit_tokens',
  'batch_tokens', 'state', 'max_running'
)
local ready, slots = credit[5] == 'ready', tonumber(credit[6]) or 0
local blocks, running = tonumber(credit[1]) or 0, tonumber(credit[2]) or 0
local tokens, budget = tonumber(credit[3]) or 0, tonumber(credit[4]) or 0
local used_blocks, used_running, used_tokens = 0, 0, 0

-- A whole number from 0, or nil: what is not would end the call half-way later.
local function cost(text)
  return string.find(text, '^%d+$') and #text < 16 and tonumber(text) or nil
end

-- What is larger than the whole goes when all of the whole is left.
local function within(need, left, whole)
  return need <= left or (need > whole and left >= whole)
end

local function has_credit(cost_blocks, cost_running, cost_tokens)
  return ready
    and running - used_running >= 1
    and blocks - used_blocks >= cost_blocks
    and within(cost_running, running - used_running, slots)
    and within(cost_tokens, tokens - used_tokens, budget)
end

-- KV blocks, running slots and prefill tokens of an item, or nil without credit.
local function costs(a)
  local prompt, cost_blocks = cost(ARGV[a + 2]), cost(ARGV[a + 4])
  local choices = cost(ARGV[a + 7])
  if prompt and choices and cost_blocks and choices > 0
    and prompt * choices < 2 ^ 53 and has_credit(cost_blocks, choices, prompt * choices) then
    return cost_blocks, choices, prompt * choices
  end
  return nil
end

local function refusal(job, k)
  if job == nil then
    return 'gone'
  elseif job.state == 'cancelled' or job.state == 'expired' then
    return job.state
  elseif job.state ~= 'queued' then
    return 'gone'
  elseif job.deadline ~= '' and (tonumber(job.deadline) or 0) <= now then
    return 'expired'
  elseif job.entry_key ~= KEYS[k + 3] then
    return 'moved'
  end
  return nil
end

local function dispatch(a, k)
  local job = read_job(KEYS[k + 1], FIELDS)
  if job and job.state == 'dispatched' and job.owner == group and job.batch == batch then
    return 'dispatched', job.epoch
  end
  local refused = refusal(job, k)
  if refused == 'gone' and ARGV[a + 6] ~= '' then
    redis.pcall('XDEL', KEYS[k + 3], ARGV[a + 6]) -- a stale entry is read only once
  end
  if refused then
    return refused, 0
  end
  local cost_blocks, cost_running, cost_tokens = costs(a)
  if not cost_blocks then
    return 'no_credit', 0
  end
  local id, epoch = ARGV[a + 1], (tonumber(job.epoch) or 0) + 1
  -- First, since it is the one that a server without memory refuses.
  redis.call('SET', KEYS[k + 2], ARGV[a + 3])
  local entry = redis.call(
    'XADD', KEYS[6], '*', 'id', id, 'epoch', epoch, 'batch', batch
  )
  redis.pcall('XDEL', KEYS[k + 3], job.entry)
  redis.call(
    'HSET', KEYS[k + 1], 'state', 'dispatched', 'epoch', epoch, 'owner', group,
    'batch', batch, 'tokens', ARGV[a + 2], 'bucket', ARGV[a + 5],
    'dispatched_ms', now, 'cost_blocks', ARGV[a + 4], 'cost_running', cost_running,
    'cost_tokens', string.format('%.0f', cost_tokens), 'credit_tokens_back', '0',
    'entry', entry, 'entry_key', KEYS[6]
  )
  if KEYS[k + 3] ~= KEYS[7] then
    lanes[KEYS[k + 3]] = job.class .. ':' .. job.bucket .. ':' .. job.lane
  end
  leases[#leases + 1] = until_ms
  leases[#leases + 1] = id
  used_blocks, used_running = used_blocks + cost_blocks, used_running + cost_running
  used_tokens = used_tokens + cost_tokens
  count_drained(job.class, job.tenant, job.tokens)
  return 'dispatched', epoch
end

local fenced = redis.call('HGET', KEYS[1], 'fence') ~= ARGV[1]
for i = 1, count do
  local status, epoch = 'fenced', 0
  if not fenced then
    status, epoch = dispatch(HEAD + (i - 1) * WIDTH, KEYS_HEAD + (i - 1) * KEYS_WIDTH)
  end
  replies[#replies + 1] = status
  replies[#replies + 1] = epoch
end
if used_running > 0 then
  redis.call('ZADD', KEYS[4], unpack(leases))
  redis.call('HINCRBY', KEYS[5], 'credit_blocks', -used_blocks)
  redis.call('HINCRBY', KEYS[5], 'credit_running', -used_running)
  redis.call('HINCRBY', KEYS[5], 'credit_tokens', -used_tokens)
  redis.call('PEXPIRE', KEYS[6], WORK_KEEP_MS)
  for stream, member in pairs(lanes) do
    refresh_lane(KEYS[3], stream, member)
  end
  save_load(KEYS[2], now)
end
return replies
