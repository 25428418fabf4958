-- How a job ends, is fenced off, or goes back to the queue. Needs usage.lua before it.
--
-- A job's own keys always stand in this order from KEYS[at]:
--   +0 job hash   +1 in string   +2 ids string   +3 out string
--   +4 tok stream +5 wake channel +6 idem string (the job hash again when it has none)
local DONE_LENGTH = 10000 -- terminal events kept for the orchestrator
local DEAD_LENGTH = 10000 -- dead letters kept at most; the janitor drops them by age
local DEFAULT_KEEP_MS, MOST_KEEP_MS = 3600000, 3155760000000

-- Whether KEYS names the job's idempotency key (or rightly none).
local function knows_idem(at, job)
  return (job.idem ~= '') == (KEYS[at + 6] ~= KEYS[at])
end

-- The epoch after the record's; one that a stranger made no number begins again.
local function next_epoch(job)
  local epoch = tonumber(job.epoch) or 0
  return (epoch >= 0 and epoch < 1e9 and math.floor(epoch) or 0) + 1
end

-- How long the job's keys stay, whatever a stranger has written into its record.
local function keep_of(job)
  local keep = tonumber(job.keep_ms) or DEFAULT_KEEP_MS
  return keep >= 1 and keep <= MOST_KEEP_MS and math.floor(keep) or DEFAULT_KEEP_MS
end

-- Raises the epoch and writes `<epoch>-0` to the log, if there is one: from here on
-- no entry of an earlier epoch can be added. A log of another type is left alone.
local function fence(at, job)
  local epoch = next_epoch(job)
  redis.call('HSET', KEYS[at], 'epoch', epoch)
  redis.pcall('XADD', KEYS[at + 4], 'NOMKSTREAM', epoch .. '-0', 'f', '1')
  return epoch
end

-- Keeps a job that failed for people to look at and to requeue.
local function bury(dead_key, id, reason, error)
  redis.pcall(
    'XADD', dead_key, 'MAXLEN', '~', DEAD_LENGTH, '*', 'id', id, 'reason', reason,
    'error', error
  )
end

-- Makes the job terminal: result, end marker, expiry of all its keys, event, wake.
-- `owner` stays in the record only when the owner itself finished, so that its
-- repeated call is recognised; the event names it likewise, or `told_by`: who is
-- named there logs the job's end; where nobody is, the active scheduler does.
-- `log_id` is the owner's id for the end marker. What a dead letter needs (record, input
-- and result) stays for `dead_ms` where that is given.
local function conclude(at, id, job, now, ending)
  local keep, epoch = keep_of(job), next_epoch(job)
  local log_id, marked = ending.log_id, nil
  count_usage(at, job, ending)
  if log_id then
    marked = redis.pcall('XADD', KEYS[at + 4], 'NOMKSTREAM', log_id, 'd', ending.finale)
  end
  -- Without the owner's id, or when it repeats an old one, the marker opens the new
  -- epoch, so that it always stands last. A log of another type is left alone.
  if not log_id or (type(marked) == 'table' and marked.err) then
    redis.pcall('XADD', KEYS[at + 4], 'NOMKSTREAM', epoch .. '-0', 'f', '1')
    redis.pcall(
      'XADD', KEYS[at + 4], 'NOMKSTREAM', epoch .. '-1', 'd', ending.finale
    )
  end
  redis.call(
    'HSET', KEYS[at], 'state', ending.state, 'epoch', epoch,
    'owner', ending.owner or '', 'finished_ms', now, 'entry', '', 'entry_key', ''
  )
  if ending.reason and ending.reason ~= '' then
    redis.call('HSET', KEYS[at], 'last_error', ending.reason)
  end
  local long = math.max(keep, tonumber(ending.dead_ms or '') or 0)
  redis.call('SET', KEYS[at + 3], ending.result, 'PX', long)
  redis.call('PEXPIRE', KEYS[at], long)
  redis.call('PEXPIRE', KEYS[at + 1], long)
  redis.call('PEXPIRE', KEYS[at + 2], keep)
  redis.call('PEXPIRE', KEYS[at + 4], keep)
  if job.idem ~= '' then
    redis.call('PEXPIRE', KEYS[at + 6], keep)
  end
  local event = {
    'id', id, 'state', ending.state, 'class', job.class, 'tenant', job.tenant,
    'owner', ending.owner or ending.told_by or '',
  }
  if job.webhook ~= '' then
    event[#event + 1], event[#event + 2] = 'webhook', '1'
  end
  redis.pcall(
    'XADD', ending.done_key, 'MAXLEN', '~', DONE_LENGTH, '*', unpack(event)
  )
  redis.call('PUBLISH', KEYS[at + 5], ending.finale)
end
