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
-- ARGV 1 fence, 2 group, 3 batch, 4 lease in ms, 5 number of jobs; then eight for each:
--      id, exact prompt tokens, token ids (little-endian int32), KV blocks to reserve,
--      bucket by exact length, stream id of its entry where known, or '', choices
--      (each takes a running slot and prefills the prompt), 1 to run it alone, else 0
-- Returns two for each job: status and epoch (0 unless dispatched or newer).
--      dispatched  the group has it (also when this very call is repeated)
--      moved       its entry is in another stream than the one given: ask again
--      no_credit   the group has no room for it now: not enough credit, it runs a job
--                  alone, or it is not empty for one that is to run alone
--      newer       the group does not read its record; the schema version of that
--                  stands in place of the epoch
--      gone, cancelled, expired, fenced
-- Credit: bulk takes what is left; interactive work also what bulk holds, so that
-- credit may go down to minus that. Whatever is larger than the whole goes alone.
--include clock
--include record
--include load
--include lanes
--include credit
local HEAD, WIDTH, KEYS_HEAD, KEYS_WIDTH = 5, 8, 7, 3
local WORK_KEEP_MS = 3600000 -- a work stream nobody fills any more goes by itself
local FIELDS = {
  'state', 'epoch', 'owner', 'batch', 'deadline', 'tokens', 'bytes', 'class', 'tenant',
  'entry', 'entry_key', 'v',
}
local group, batch, count = ARGV[2], ARGV[3], tonumber(ARGV[5])
local now, replies, lanes, leases = now_ms(), {}, {}, {}
local until_ms = now + tonumber(ARGV[4])
local view = redis.call(
  'HMGET', KEYS[5], 'credit_blocks', 'credit_running', 'credit_tokens',
  'bulk_blocks', 'bulk_running', 'bulk_tokens', 'max_running', 'batch_tokens',
  'state', 'alone', 'schema'
)
local function in_view(i)
  return tonumber(view[i]) or 0
end
local left = { blocks = in_view(1), running = in_view(2), tokens = in_view(3) }
local bulk = { blocks = in_view(4), running = in_view(5), tokens = in_view(6) }
local slots, budget, schema = in_view(7), in_view(8), math.max(in_view(11), 1)
local ready, keeps_bulk, alone = view[9] == 'ready', view[4], view[10] or ''
local taken, took = new_credit(), false

-- A whole number from 0, or nil: what is not would end the call half-way later.
local function cost(text)
  return string.find(text, '^%d+$') and #text < 16 and tonumber(text) or nil
end

-- What is larger than the whole goes when all of the whole is left.
local function within(need, there, whole)
  return need <= there or (need > whole and there >= whole)
end

local function has_room(job, item)
  if not ready or alone ~= '' then
    return false
  elseif item.alone then
    -- Every job held takes a slot: with all slots left, none is.
    return left.running >= slots and left.blocks >= item.blocks
  end
  local over = job.class == 'interactive' and bulk
    or { blocks = 0, running = 0, tokens = 0 }
  return left.running + over.running >= 1
    and left.blocks + over.blocks >= item.blocks
    and within(item.running, left.running + over.running, slots)
    and within(item.tokens, left.tokens + over.tokens, budget)
end

-- KV blocks, running slots and prefill tokens of an item, or nil for what is no size.
local function item_of(a)
  local prompt, blocks = cost(ARGV[a + 2]), cost(ARGV[a + 4])
  local choices = cost(ARGV[a + 7])
  if prompt and choices and blocks and choices > 0 and prompt * choices < 2 ^ 53 then
    return {
      blocks = blocks, running = choices, tokens = prompt * choices,
      alone = ARGV[a + 8] == '1',
    }
  end
  return nil
end

-- Books what the job takes; a group that keeps no books of bulk gets none.
local function book(id, class, item)
  local held = { blocks = item.blocks, running = item.running, tokens = item.tokens }
  add_credit(taken, keeps_bulk and class or '', held)
  for name, amount in pairs(held) do
    left[name] = left[name] - amount
    if keeps_bulk and class == 'bulk' then
      bulk[name] = bulk[name] + amount
    end
  end
  if item.alone then
    alone = id
    redis.call('HSET', KEYS[5], 'alone', id)
  end
  took = true
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
  local needed = tonumber(job.v) or 1
  if ready and needed > schema then
    return 'newer', string.format('%.0f', math.min(needed, 2 ^ 53))
  end
  local item = item_of(a)
  if not item or not has_room(job, item) then
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
    'dispatched_ms', now, 'cost_blocks', ARGV[a + 4], 'cost_running', item.running,
    'cost_tokens', string.format('%.0f', item.tokens), 'credit_tokens_back', '0',
    'prefilled', '', 'alone', item.alone and '1' or '0',
    'entry', entry, 'entry_key', KEYS[6]
  )
  if KEYS[k + 3] ~= KEYS[7] then
    lanes[KEYS[k + 3]] = true
  end
  leases[#leases + 1] = until_ms
  leases[#leases + 1] = id
  book(id, job.class, item)
  count_drained(job)
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
if took then
  redis.call('ZADD', KEYS[4], unpack(leases))
  save_credit(KEYS[5], taken, -1)
  redis.call('PEXPIRE', KEYS[6], WORK_KEEP_MS)
  for stream in pairs(lanes) do
    refresh_lane(KEYS[3], stream)
  end
  save_load(KEYS[2], now)
end
return replies
