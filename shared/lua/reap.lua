-- reap: acts on jobs whose lease, deadline or delay has passed. The caller says what
-- it expects from what it read; each job is checked again here and left alone when it
-- has changed (the next reap sees it again).
--
-- KEYS 1 scheduler hash     fence of the active scheduler
--      2 lease     zset     job id -> ms at which its lease ends
--      3 deadline  zset     job id -> ms of its deadline
--      4 delayed   zset     job id -> ms at which it is due
--      5 load      hash     counters of waiting work
--      6 lanes     zset     lanes with waiting entries
--      7 done      stream   terminal events, trimmed
--      8 dlq       stream   dead letters, trimmed
--      9 bell      channel  to the scheduler
--     10 resume    stream   where redelivered jobs go, read first
--     11 usage     hash     what tenants have used, by day
--      then nine for each job: job hash, in string, ids string, out string,
--      tok stream, wake channel, idem string (the job hash again when it has none),
--      group hash of its owner, stream of its entry (the job hash where there is none)
-- ARGV 1 fence, 2 most leases lost while a job ran alone, 3 most dispatches in a row
--      that a living group does not start, 4 ms that a dead letter's record, input and
--      result stay, 5 number of jobs; then seven for each: id, action (due, expire,
--      redeliver, cancel, dead, unstartable, forget, stray), owner and stream of the
--      entry as last read, JSON JobResult, JSON Delta with `end` and JSON JobError of a
--      lost lease ('' where unused)
-- Returns one for each job: the action, or skipped, or fenced.
-- A group that dies takes the leases of all its jobs with it, so that a loss accuses
-- each of them a little; only a loss while a job ran alone convicts it.
--include clock
--include record
--include load
--include lanes
--include credit
--include usage
--include ending
--include requeue
local HEAD, WIDTH, KEYS_HEAD, KEYS_WIDTH = 5, 7, 11, 9
local WAITING = { queued = true, delayed = true, retrying = true }
local ACTIVE = { dispatched = true, running = true }
local most_alone, most_starts = tonumber(ARGV[2]), tonumber(ARGV[3])
local now, replies, moved = now_ms(), {}, false

local function passed(key, id)
  local score = tonumber(redis.call('ZSCORE', key, id) or '')
  return score ~= nil and score <= now
end

-- Whether the loss of its lease is to be counted. Who reported it (see forfeit.lua) may
-- have said that it is no fault of the job.
local function counts(job)
  local epoch, counted = string.match(job.lost, '^(%d+) ([01]) ')
  return job.state == 'running' and not (epoch == job.epoch and counted == '0')
end

-- What the job's present record calls for, by the same rules as the caller's.
local function due_action(id, job)
  if not job or not (WAITING[job.state] or ACTIVE[job.state]) then
    return 'forget'
  elseif passed(KEYS[3], id) then
    return 'expire'
  elseif ACTIVE[job.state] and passed(KEYS[2], id) then
    if job.cancel == '1' then
      return 'cancel'
    elseif counts(job) and job.alone == '1'
      and (tonumber(job.alone_losses) or 0) + 1 >= most_alone then
      return 'dead'
    elseif job.state == 'dispatched'
      and (tonumber(job.start_losses) or 0) + 1 >= most_starts then
      return 'unstartable'
    end
    return 'redeliver'
  elseif job.state ~= 'queued' and WAITING[job.state] and passed(KEYS[4], id) then
    return 'due'
  elseif (WAITING[job.state] and redis.call('ZSCORE', KEYS[2], id))
    or (job.state ~= 'delayed' and job.state ~= 'retrying'
      and redis.call('ZSCORE', KEYS[4], id)) then
    return 'stray'
  end
  return 'skipped'
end

-- A member that does not belong to the job's state: only a stranger puts it there.
local function drop_stray(id, job)
  if WAITING[job.state] then
    redis.call('ZREM', KEYS[2], id)
  end
  if job.state ~= 'delayed' and job.state ~= 'retrying' then
    redis.call('ZREM', KEYS[4], id)
  end
end

local function forget(id)
  redis.call('ZREM', KEYS[2], id)
  redis.call('ZREM', KEYS[3], id)
  redis.call('ZREM', KEYS[4], id)
end

-- Takes the job from where it is: its group's credit or the counters, and its entry.
local function detach(at, job)
  if job.entry_key ~= '' then
    redis.pcall('XDEL', KEYS[at + 8], job.entry)
    if job.state == 'queued' and job.entry_key ~= KEYS[10] then
      refresh_lane(KEYS[6], KEYS[at + 8])
    end
  end
  if ACTIVE[job.state] then
    local credit = new_credit()
    give_back(credit, job)
    save_credit(KEYS[at + 7], credit, 1)
  end
end

-- Writes a loss into the record; a group that is draining may be ended at any time.
local function count_loss(at, job, error)
  if not counts(job) or redis.pcall('HGET', KEYS[at + 7], 'state') == 'draining' then
    return
  end
  job.lease_losses = (tonumber(job.lease_losses) or 0) + 1
  redis.call('HSET', KEYS[at], 'lease_losses', job.lease_losses, 'last_error', error)
  if job.alone == '1' then
    local losses = (tonumber(job.alone_losses) or 0) + 1
    redis.call('HSET', KEYS[at], 'alone_losses', losses)
  end
end

local function redeliver(at, id, job, error)
  redis.call('ZREM', KEYS[2], id)
  count_loss(at, job, error)
  detach(at, job)
  if job.lost ~= '' then
    redis.call('HDEL', KEYS[at], 'lost')
  end
  if job.state == 'dispatched' and redis.call('EXISTS', KEYS[at + 7]) == 1 then
    -- A group that lives and did not start it: the job may be what is wrong. The loss
    -- of a group that died costs nothing.
    local losses = (tonumber(job.start_losses) or 0) + 1
    redis.call('HSET', KEYS[at], 'start_losses', losses)
  end
  fence(at, job)
  requeue(at, id, job, KEYS[10], 'lease_lost')
  count_waiting(job, 1)
end

local function due(at, id, job)
  redis.call('ZREM', KEYS[4], id)
  count_waiting(job, -1, LATER)
  count_waiting(job, 1)
  requeue(at, id, job, KEYS[10], job.state == 'retrying' and 'retry' or 'due')
end

local function finish(at, a, id, job, action)
  forget(id)
  detach(at, job)
  if WAITING[job.state] then
    count_drained(job)
  end
  local states = {
    expire = 'expired', cancel = 'cancelled', dead = 'failed', unstartable = 'failed',
  }
  local dead = action == 'dead' or action == 'unstartable'
  if action == 'dead' then
    count_loss(at, job, ARGV[a + 7])
  elseif action == 'unstartable' then
    redis.call('HSET', KEYS[at], 'start_losses', (tonumber(job.start_losses) or 0) + 1)
  end
  local kept = dead and job.tenant ~= SHADOW
  if kept then
    local reason = action == 'dead' and 'lease_losses' or 'start_losses'
    bury(KEYS[8], id, reason, ARGV[a + 7])
  end
  conclude(at, id, job, now, {
    state = states[action], result = ARGV[a + 5], finale = ARGV[a + 6],
    reason = dead and ARGV[a + 7] or '', done_key = KEYS[7],
    dead_ms = kept and ARGV[4] or nil,
  })
end

local function reap(a, at)
  local id, action = ARGV[a + 1], ARGV[a + 2]
  local job = read_job(KEYS[at], REQUEUE_FIELDS)
  if due_action(id, job) ~= action then
    return 'skipped'
  elseif action == 'forget' then
    forget(id)
    return action
  elseif action == 'stray' then
    drop_stray(id, job)
    return action
  elseif job.owner ~= ARGV[a + 3] or job.entry_key ~= ARGV[a + 4]
    or not knows_idem(at, job) then
    return 'skipped'
  end
  moved = true
  if (action == 'unstartable' and redis.call('EXISTS', KEYS[at + 7]) == 0)
    or (action == 'dead' and redis.pcall('HGET', KEYS[at + 7], 'state') == 'draining') then
    action = 'redeliver'
  end
  if action == 'redeliver' then
    redeliver(at, id, job, ARGV[a + 7])
  elseif action == 'due' then
    due(at, id, job)
  else
    finish(at, a, id, job, action)
  end
  return action
end

local fenced = redis.call('HGET', KEYS[1], 'fence') ~= ARGV[1]
for i = 1, tonumber(ARGV[5]) do
  if fenced then
    replies[i] = 'fenced'
  else
    replies[i] = reap(HEAD + (i - 1) * WIDTH, KEYS_HEAD + (i - 1) * KEYS_WIDTH + 1)
  end
end
if moved then
  save_load(KEYS[5], now)
  save_usage(KEYS[11], now)
  redis.call('PUBLISH', KEYS[9], 'reap')
end
return replies
