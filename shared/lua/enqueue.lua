-- enqueue: records new jobs. Safe to repeat: ids are made by the client.
--
-- KEYS 1 load      hash     counters of waiting work and the measured drain rate
--      2 lanes     zset     lanes with waiting entries
--      3 recent    zset     newest jobs by time of enqueue
--      4 deadline  zset     job id -> ms of its deadline
--      5 delayed   zset     job id -> ms at which it is due
--      6 bell      channel  to the scheduler
--      7 limits    hash     what may wait, written by the scheduler
--      8 rates     zset     tenant -> ms at which its allowance of tokens is full again
--      then four for each job:
--      job:<id>                      hash    the record
--      in:<id>                       string  the payload
--      q:<class>:<bucket>:<lane>     stream  its lane
--      idem:<tenant>:<key>           string  `<job id> <payload hash>`; where the job
--                                            has no idempotency key: job:<id> again
--      and, where a job has a webhook, at last:
--      webhooks  zset  job id with a webhook that is not settled -> ms of its enqueue
-- ARGV 1 number of jobs; then two for each job: its facts, a JSON object, and its
--      payload, a JSON JobRequest. The facts, with the defaults of those that may be
--      left out:
--       id               <model>.<partition>.<16 to 40 of a-z 0-9>, of this shard
--       hash             1 to 64 characters without white space; the same for the same
--                        payload
--       class            interactive or bulk; interactive
--       tenant           1 to 64 letters, digits and . _ @ + -; default
--       priority         whole number, -100 to 100, smaller is more urgent; 0
--       bucket           1 to 10 of a-z 0-9, as in the name of its lane
--       lane             0 to 255, as in the name of its lane
--       tokens           estimated prompt tokens, at least 1
--       max_tokens       most output tokens of all choices, at least 1
--       seed             text of digits, 0 to 2^63 - 1
--       deadline_ms      ms from now after which the job expires; none
--       delay_ms         ms to wait before it is queued; 0
--       not_before_ms    or the time of Redis at which it is queued; none
--       keep_ms          ms that results and logs stay after the end; an hour
--       idempotency_key  1 to 200 printable ASCII characters without blanks; none
--       refuse_late      true: refuse the job if it cannot meet its deadline; false
--       webhook          http(s) address that is told of the end; none
--       version          the only version of the model that is to run it, 1 to 32
--                        letters, digits and . _ + -; none
--       adapter          name of the adapter of its request, for who looks at the
--                        record; 1 to 64 letters, digits and . _ -; none
--       v                lowest schema version whose readers understand the job; 1
-- Returns four for each job: status, job id, ms (or ''), detail (or '').
--      queued     recorded
--      duplicate  recorded before with the same payload; the id is that of the first
--      conflict   id or idempotency key was used with another payload
--      full       a limit is reached; nothing was recorded; ms after which a retry has
--                 a chance; detail begins with the limit's name and a colon
--      late       its deadline cannot be met; nothing was recorded; ms it would take
--      invalid    a fact is wrong; nothing was recorded; detail names it
--include clock
--include load
--include refused
--include facts
--include limits
local KEYS_HEAD, KEYS_WIDTH, WIDTH = 8, 4, 2
local RECENT_LENGTH = 10000
local MOST_TOLD = 4 -- jobs that the bell names, so that they are fetched at once
local DEFAULT_KEEP_MS = 3600000 -- not stored: readers take it where there is none
local count = tonumber(ARGV[1] or '')
if not count or #ARGV ~= 1 + count * WIDTH
  or (#KEYS ~= KEYS_HEAD + count * KEYS_WIDTH
    and #KEYS ~= KEYS_HEAD + count * KEYS_WIDTH + 1) then
  return redis.error_reply(
    'ERR tokenmill enqueue: expected a number, 8 keys, and 2 arguments and 4 keys a job'
  )
end
local hooks = KEYS[KEYS_HEAD + count * KEYS_WIDTH + 1]
local now = now_ms()
local shard = shard_of(string.sub(KEYS[1], 1, -5))
local limits = read_limits(KEYS[7], KEYS[8], KEYS[1], now)
local lanes, recent, arrivals, replies, queued = {}, {}, {}, {}, false

-- Returns status, id and detail when the job or its idempotency key is known.
local function known(job, k)
  local before = redis.pcall('HMGET', KEYS[k + 1], 'state', 'hash')
  if before.err then
    return 'invalid', job.id, 'keys: job:<id> holds another type'
  elseif before[1] then
    if before[2] == job.hash then
      return 'duplicate', job.id, ''
    end
    return 'conflict', job.id, 'this id was used with another payload'
  elseif job.idem == '' then
    return nil
  end
  local holder = redis.pcall('GET', KEYS[k + 4])
  if type(holder) == 'table' then
    return 'invalid', job.id, 'keys: idem:<tenant>:<key> holds another type'
  elseif holder then
    local first, hash = string.match(holder, '^(%S+) (%S+)$')
    if hash == job.hash then
      return 'duplicate', first, ''
    end
    return 'conflict', first or job.id,
      'this idempotency key was used with another payload'
  end
  return nil
end

-- Puts the job where it waits. The only write here that can fail comes first; only
-- lack of memory or a stranger's key in place of a lane can make it fail.
local function place(job, k)
  if job.due then
    return redis.pcall('ZADD', KEYS[5], job.due, job.id)
  end
  -- Always the same fields in the same order: a stream then packs their names away.
  return redis.pcall(
    'XADD', KEYS[k + 3], '*', 'id', job.id, 'tokens', job.tokens,
    'max_tokens', job.max_tokens, 'priority', job.priority, 'deadline', job.deadline,
    'tenant', job.tenant, 'bytes', job.bytes
  )
end

-- What has its default is left out: a record is a small packed list while it waits.
local function record(job, k, payload, entry)
  local fields = {
    'state', job.due and 'delayed' or 'queued', 'tokens', job.tokens,
    'class', job.class, 'tenant', job.tenant, 'bucket', job.bucket,
    'max_tokens', job.max_tokens, 'seed', job.seed, 'enqueued_ms', now,
    'bytes', job.bytes, 'hash', job.hash,
  }
  local function add(name, value, default)
    if value ~= default then
      fields[#fields + 1] = name
      fields[#fields + 1] = value
    end
  end
  if not job.due then
    add('entry', entry)
    add('entry_key', KEYS[k + 3])
  end
  add('deadline', job.deadline, '')
  add('keep_ms', job.keep_ms, DEFAULT_KEEP_MS)
  add('idem', job.idem, '')
  add('priority', job.priority, 0)
  add('webhook', job.webhook, '')
  add('version', job.version, '')
  add('adapter', job.adapter, '')
  add('v', job.v, 1)
  redis.call('HSET', KEYS[k + 1], unpack(fields))
  redis.call('SET', KEYS[k + 2], payload)
  if job.idem ~= '' then
    redis.call('SET', KEYS[k + 4], job.id .. ' ' .. job.hash)
  end
  if job.deadline ~= '' then
    redis.call('ZADD', KEYS[4], job.deadline, job.id)
  end
  if not job.due then
    queued = true
    arrivals[#arrivals + 1] = job.class .. ':' .. job.id
    lanes[job.class .. ':' .. job.bucket .. ':' .. job.lane] = true
  end
  if job.webhook ~= '' then
    redis.pcall('ZADD', hooks, now, job.id)
  end
  recent[#recent + 1] = now
  recent[#recent + 1] = job.id
end

local function enqueue(i)
  local k, payload = KEYS_HEAD + (i - 1) * KEYS_WIDTH, ARGV[1 + i * WIDTH]
  local job, wrong = facts_of(ARGV[i * WIDTH], payload, shard, now)
  wrong = wrong or wrong_keys(job, shard, k, hooks) or wrong_size(limits, job)
  if wrong then
    return 'invalid', job and job.id or '', '', wrong
  end
  local status, id, detail = known(job, k)
  if status then
    return status, id, '', detail
  end
  local wait, limit = over_limit(limits, job)
  if wait then
    return 'full', job.id, wait, limit
  end
  local needed = job.refuse_late and lateness(limits, job)
  if needed then
    return 'late', job.id, needed, 'deadline_ms: the job would be done too late'
  end
  local entry = place(job, k)
  if type(entry) == 'table' and entry.err then
    return 'error', job.id, '', entry.err
  end
  record(job, k, payload, entry)
  take_room(limits, job)
  count_waiting(job, 1, job.due and LATER)
  return 'queued', job.id, '', ''
end

for i = 1, count do
  local status, id, wait, detail = enqueue(i)
  if status == 'error' then
    if #recent == 0 and refuses_writes(detail) then
      return redis.error_reply(detail) -- nothing is written yet: refuse the whole call
    end
    status, detail = 'invalid', 'keys: ' .. detail
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
  save_rates(limits)
end
if queued then
  if #arrivals > MOST_TOLD then
    arrivals = {} -- the scheduler reads so many in one go anyway
  end
  redis.call('PUBLISH', KEYS[6], table.concat({ 'enqueue', unpack(arrivals) }, ' '))
end
return replies
