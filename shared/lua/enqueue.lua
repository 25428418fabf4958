-- enqueue: records new jobs. Safe to repeat: ids are made by the client.
--
-- KEYS 1 load      hash     counters of waiting work and the measured drain rate
--      2 lanes     zset     lanes with waiting entries
--      3 recent    zset     newest jobs by time of enqueue
--      4 deadline  zset     job id -> ms of its deadline
--      5 delayed   zset     job id -> ms at which it is due
--      6 bell      channel  to the scheduler
--      then four for each job:
--      job:<id>                      hash    the record
--      in:<id>                       string  the payload
--      q:<class>:<bucket>:<lane>     stream  its lane
--      idem:<tenant>:<key>           string  `<job id> <payload hash>`; where the job
--                                            has no idempotency key: job:<id> again
-- ARGV 1 most waiting jobs, 2 most waiting tokens, 3 most waiting jobs of one tenant,
--      4 number of jobs; then fifteen for each job:
--       1 id              <model>.<partition>.<16 to 40 of a-z 0-9>, of this shard
--       2 payload         JSON JobRequest
--       3 payload hash    any text without white space; the same for the same payload
--       4 class           interactive or bulk
--       5 tenant          1 to 64 letters, digits and . _ @ + -
--       6 priority        whole number, -100 to 100; smaller is more urgent
--       7 bucket          1 to 10 of a-z 0-9, as in the name of its lane
--       8 lane            0 to 255, as in the name of its lane
--       9 tokens          estimated prompt tokens, at least 1
--      10 max tokens      most output tokens of all choices, at least 1
--      11 seed            0 to 2^63 - 1
--      12 deadline        ms from now after which the job expires, or ''
--      13 delay           ms to wait before it is queued, or 0
--      14 keep            ms that results and logs stay after the end, at least 1
--      15 idempotency key 1 to 200 printable ASCII characters without blanks, or ''
-- Returns four for each job: status, job id, retry-after in ms (or ''), detail (or '').
--      queued     recorded
--      duplicate  recorded before with the same payload; the id is that of the first
--      conflict   id or idempotency key was used with another payload
--      full       a limit is reached; nothing was recorded
--      invalid    an argument is wrong; nothing was recorded; detail names it
--include clock
--include load
local HEAD, WIDTH, KEYS_HEAD, KEYS_WIDTH = 4, 15, 6, 4
local RECENT_LENGTH = 10000
local MOST_TOLD = 4 -- jobs that the bell names, so that they are fetched at once
local LEAST_RETRY_MS, MOST_RETRY_MS, BLIND_RETRY_MS = 100, 60000, 5000
local MOST_MS = 3155760000000 -- a hundred years; larger is a mistake
local MOST_SEED = '9223372036854775807'
local count = tonumber(ARGV[4] or '')
local max_jobs = tonumber(ARGV[1] or '')
local max_tokens = tonumber(ARGV[2] or '')
local max_tenant = tonumber(ARGV[3] or '')
if not (count and max_jobs and max_tokens and max_tenant)
  or #ARGV ~= HEAD + count * WIDTH or #KEYS ~= KEYS_HEAD + count * KEYS_WIDTH then
  return redis.error_reply(
    'ERR tokenmill enqueue: expected 4 numbers and 15 arguments and 4 keys a job'
  )
end
local prefix = string.sub(KEYS[1], 1, -5)
local now = now_ms()
local state = redis.call(
  'HMGET', KEYS[1], 'jobs', 'tokens', 'rate_jobs', 'rate_tokens', 'rate_ms'
)
local jobs, tokens = tonumber(state[1]) or 0, tonumber(state[2]) or 0
local tenants, lanes, recent, arrivals, replies = {}, {}, {}, {}, {}
local queued = false

local function whole(text, least, most)
  local value = #text <= 16 and string.find(text, '^-?%d+$') and tonumber(text)
  return value and value >= least and value <= most
end

-- As the number would be written: the name of a lane or shard has one spelling.
local function plain(text, most)
  return whole(text, 0, most) and text == string.format('%d', text)
end

local function is_text(text, pattern, longest)
  return #text <= longest and string.find(text, pattern) ~= nil
end

-- What the scheduler would refuse as well: by the same rules as keys.py and validate.py.
local function named_wrong(id, tenant, bucket, idem)
  local model, partition, unique = string.match(
    id, '^([%w_][%w._/-]*)%.(%d+)%.([a-z0-9]+)$'
  )
  if not model or #model > 96 or not plain(partition, 999)
    or #unique < 16 or #unique > 40 then
    return 'id: expected <model>.<partition>.<16 to 40 of a-z and 0-9>'
  elseif prefix ~= 'tm:{' .. model .. ':' .. partition .. '}:' then
    return 'id: expected model and partition of the shard in the keys'
  elseif not is_text(tenant, '^[%w_][%w._@+-]*$', 64) then
    return 'tenant: expected 1 to 64 letters, digits and . _ @ + -, '
      .. 'beginning with a letter, a digit or _'
  elseif not is_text(bucket, '^[a-z0-9]+$', 10) then
    return 'bucket: expected 1 to 10 of a-z and 0-9'
  elseif idem ~= '' and not is_text(idem, '^[!-~]+$', 200) then
    return 'idempotency key: expected 1 to 200 printable ASCII characters '
      .. 'without blanks'
  end
  return nil
end

local function problem(a, k)
  local id, class, tenant = ARGV[a + 1], ARGV[a + 4], ARGV[a + 5]
  local lane = class .. ':' .. ARGV[a + 7] .. ':' .. ARGV[a + 8]
  local idem = ARGV[a + 15]
  local wrong = named_wrong(id, tenant, ARGV[a + 7], idem)
  if wrong then
    return wrong
  elseif class ~= 'interactive' and class ~= 'bulk' then
    return 'class: expected interactive or bulk'
  elseif not string.find(ARGV[a + 3], '^%S+$') then
    return 'payload hash: expected text without white space'
  elseif not whole(ARGV[a + 6], -100, 100) then
    return 'priority: expected a whole number from -100 to 100'
  elseif not plain(ARGV[a + 8], 255) then
    return 'lane: expected a whole number from 0 to 255'
  elseif not whole(ARGV[a + 9], 1, 1e9) then
    return 'tokens: expected a whole number from 1'
  elseif not whole(ARGV[a + 10], 1, 1e9) then
    return 'max tokens: expected a whole number from 1'
  elseif not string.find(ARGV[a + 11], '^%d+$') or #ARGV[a + 11] > 19
    or (#ARGV[a + 11] == 19 and ARGV[a + 11] > MOST_SEED) then
    return 'seed: expected a whole number from 0 to 2^63 - 1'
  elseif ARGV[a + 12] ~= '' and not whole(ARGV[a + 12], 0, MOST_MS) then
    return 'deadline: expected ms from now, or nothing'
  elseif not whole(ARGV[a + 13], 0, MOST_MS) then
    return 'delay: expected ms from 0'
  elseif not whole(ARGV[a + 14], 1, MOST_MS) then
    return 'keep: expected ms from 1'
  elseif KEYS[k + 1] ~= prefix .. 'job:' .. id or KEYS[k + 2] ~= prefix .. 'in:' .. id then
    return 'keys: expected job:<id> and in:<id> of this shard'
  elseif KEYS[k + 3] ~= prefix .. 'q:' .. lane then
    return 'keys: expected q:<class>:<bucket>:<lane> as in the arguments'
  elseif KEYS[k + 4] ~= (idem == '' and KEYS[k + 1]
      or prefix .. 'idem:' .. tenant .. ':' .. idem) then
    return 'keys: expected idem:<tenant>:<key>, or job:<id> again without a key'
  end
  return nil
end

local function retry_after(excess, field)
  local rate = decay(state[field], state[5], now) / RATE_WINDOW_MS
  local ms = rate > 0 and excess / rate or BLIND_RETRY_MS
  return string.format('%.0f', math.min(math.max(ms, LEAST_RETRY_MS), MOST_RETRY_MS))
end

-- Returns retry-after and detail when a limit is reached.
local function over_limit(tenant, size)
  if tenants[tenant] == nil then
    local field = 'tenant:' .. tenant .. ':jobs'
    tenants[tenant] = tonumber(redis.call('HGET', KEYS[1], field) or '') or 0
  end
  if jobs + 1 > max_jobs then
    return retry_after(jobs + 1 - max_jobs, 3),
      string.format('%d jobs wait and the limit is %d', jobs, max_jobs)
  elseif jobs > 0 and tokens + size > max_tokens then
    return retry_after(tokens + size - max_tokens, 4),
      string.format('%d tokens wait and the limit is %d', tokens, max_tokens)
  elseif tenants[tenant] + 1 > max_tenant then
    return retry_after(tenants[tenant] + 1 - max_tenant, 3),
      string.format('%d jobs of this tenant wait and the limit is %d',
        tenants[tenant], max_tenant)
  end
  return nil
end

-- Returns status, id and detail when the job or its idempotency key is known.
local function known(a, k)
  local before = redis.pcall('HMGET', KEYS[k + 1], 'state', 'hash')
  if before.err then
    return 'invalid', ARGV[a + 1], 'keys: job:<id> holds another type'
  elseif before[1] then
    if before[2] == ARGV[a + 3] then
      return 'duplicate', ARGV[a + 1], ''
    end
    return 'conflict', ARGV[a + 1], 'this id was used with another payload'
  elseif ARGV[a + 15] == '' then
    return nil
  end
  local holder = redis.pcall('GET', KEYS[k + 4])
  if type(holder) == 'table' then
    return 'invalid', ARGV[a + 1], 'keys: idem:<tenant>:<key> holds another type'
  elseif holder then
    local first, hash = string.match(holder, '^(%S+) (%S+)$')
    if hash == ARGV[a + 3] then
      return 'duplicate', first, ''
    end
    return 'conflict', first or ARGV[a + 1],
      'this idempotency key was used with another payload'
  end
  return nil
end

-- Puts the job where it waits. The only write here that can fail comes first; only
-- lack of memory or a stranger's key in place of a lane can make it fail.
local function place(a, k, deadline)
  if ARGV[a + 13] ~= '0' then
    return redis.pcall('ZADD', KEYS[5], now + tonumber(ARGV[a + 13]), ARGV[a + 1])
  end
  return redis.pcall(
    'XADD', KEYS[k + 3], '*', 'id', ARGV[a + 1], 'tokens', ARGV[a + 9],
    'max_tokens', ARGV[a + 10], 'priority', ARGV[a + 6], 'deadline', deadline,
    'tenant', ARGV[a + 5], 'bytes', #ARGV[a + 2]
  )
end

local function record(a, k, deadline, entry)
  local delayed = ARGV[a + 13] ~= '0'
  redis.call(
    'HSET', KEYS[k + 1], 'state', delayed and 'delayed' or 'queued', 'epoch', '0',
    'entry', delayed and '' or entry, 'entry_key', delayed and '' or KEYS[k + 3],
    'tokens', ARGV[a + 9], 'class', ARGV[a + 4], 'tenant', ARGV[a + 5],
    'bucket', ARGV[a + 7], 'lane', ARGV[a + 8], 'deadline', deadline,
    'keep_ms', ARGV[a + 14], 'idem', ARGV[a + 15], 'priority', ARGV[a + 6],
    'max_tokens', ARGV[a + 10], 'seed', ARGV[a + 11], 'enqueued_ms', now,
    'bytes', #ARGV[a + 2], 'hash', ARGV[a + 3], 'v', '1'
  )
  redis.call('SET', KEYS[k + 2], ARGV[a + 2])
  if ARGV[a + 15] ~= '' then
    redis.call('SET', KEYS[k + 4], ARGV[a + 1] .. ' ' .. ARGV[a + 3])
  end
  if deadline ~= '' then
    redis.call('ZADD', KEYS[4], deadline, ARGV[a + 1])
  end
  if not delayed then
    queued = true
    arrivals[#arrivals + 1] = ARGV[a + 4] .. ':' .. ARGV[a + 1]
    lanes[ARGV[a + 4] .. ':' .. ARGV[a + 7] .. ':' .. ARGV[a + 8]] = true
  end
  recent[#recent + 1] = now
  recent[#recent + 1] = ARGV[a + 1]
end

local function enqueue(a, k)
  local wrong = problem(a, k)
  if wrong then
    return 'invalid', ARGV[a + 1], '', wrong
  end
  local status, id, detail = known(a, k)
  if status then
    return status, id, '', detail
  end
  local size, tenant = tonumber(ARGV[a + 9]), ARGV[a + 5]
  local wait, limit = over_limit(tenant, size)
  if wait then
    return 'full', ARGV[a + 1], wait, limit
  end
  local deadline = ''
  if ARGV[a + 12] ~= '' then
    deadline = string.format('%.0f', now + tonumber(ARGV[a + 12]))
  end
  local entry = place(a, k, deadline)
  if type(entry) == 'table' and entry.err then
    return 'error', entry
  end
  record(a, k, deadline, entry)
  jobs, tokens = jobs + 1, tokens + size
  tenants[tenant] = tenants[tenant] + 1
  count_waiting(ARGV[a + 4], tenant, size, 1)
  return 'queued', ARGV[a + 1], '', ''
end

for i = 1, count do
  local a, k = HEAD + (i - 1) * WIDTH, KEYS_HEAD + (i - 1) * KEYS_WIDTH
  local status, id, wait, detail = enqueue(a, k)
  if status == 'error' then
    if #recent == 0 and string.find(id.err, 'OOM', 1, true) then
      return id -- nothing is written yet: refuse the whole call
    end
    status, id, wait, detail = 'invalid', ARGV[a + 1], '', 'keys: ' .. id.err
  end
  replies[#replies + 1] = status
  replies[#replies + 1] = id
  replies[#replies + 1] = wait
  replies[#replies + 1] = detail
end
if #recent > 0 then
  redis.call('ZADD', KEYS[3], unpack(recent))
  redis.call('ZREMRANGEBYRANK', KEYS[3], 0, -RECENT_LENGTH - 1)
  for member in pairs(lanes) do
    redis.call('ZADD', KEYS[2], 'NX', now, member)
  end
  save_load(KEYS[1], now)
end
if queued then
  if #arrivals > MOST_TOLD then
    arrivals = {} -- the scheduler reads so many in one go anyway
  end
  redis.call('PUBLISH', KEYS[6], table.concat({ 'enqueue', unpack(arrivals) }, ' '))
end
return replies
