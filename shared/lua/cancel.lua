-- cancel: someone asks for a job's end. A job that no engine runs ends at once; for a
-- running one the flag is set and its group is told.
--
-- KEYS 1 lease     zset     job id -> ms at which its lease ends
--      2 deadline  zset     job id -> ms of its deadline
--      3 delayed   zset     job id -> ms at which it is due
--      4 load      hash     counters of waiting work
--      5 lanes     zset     lanes with waiting entries
--      6 done      stream   terminal events, trimmed
--      7 bell      channel  to the scheduler
--      8 resume    stream   redelivered jobs
--      9 group     hash     of the owner (any key when the job has none)
--     10 ctl       channel  to the owner (any key when the job has none)
--     11 entry     stream   that holds the job's entry (any key when none does)
--      then seven: job hash, in string, ids string, out string, tok stream,
--      wake channel, idem string (the job hash again when it has none)
--     19 usage     hash     what tenants have used, by day; who names 18 keys, as before
--                           there was one, leaves its name to us
-- ARGV 1 id, 2 owner, 3 stream of the entry, both as last read, 4 JSON JobResult,
--      5 JSON Delta with `end`
-- Returns cancelled, cancelling, a terminal state that was reached before, unknown, or
--      keys (owner, entry or idempotency key have changed: ask again).
--include clock
--include record
--include load
--include lanes
--include credit
--include usage
--include ending
local AT = 12
local FIELDS = {
  'state', 'epoch', 'owner', 'keep_ms', 'idem', 'deadline', 'tenant', 'tokens', 'bytes',
  'entry', 'entry_key', 'webhook', unpack(CREDIT_FIELDS),
}
local WAITING = { queued = true, delayed = true, retrying = true }
local id, now, credit = ARGV[1], now_ms(), new_credit()
local job = read_job(KEYS[AT], FIELDS)
if not job then
  return 'unknown'
elseif not WAITING[job.state] and job.state ~= 'dispatched' and job.state ~= 'running' then
  return job.state
elseif job.owner ~= ARGV[2] or job.entry_key ~= ARGV[3] or not knows_idem(AT, job) then
  return 'keys'
elseif job.state == 'running' then
  -- A removal goes first, here of nothing: a server without memory then lets the rest be.
  redis.call('ZREM', KEYS[3], id)
  redis.call('HSET', KEYS[AT], 'cancel', '1')
  redis.call('PUBLISH', KEYS[10], id)
  return 'cancelling'
end
redis.call('ZREM', KEYS[1], id)
redis.call('ZREM', KEYS[2], id)
redis.call('ZREM', KEYS[3], id)
if job.entry_key ~= '' then
  redis.pcall('XDEL', KEYS[11], job.entry)
  if job.state == 'queued' and job.entry_key ~= KEYS[8] then
    refresh_lane(KEYS[5], KEYS[11])
  end
end
if job.state == 'dispatched' then
  give_back(credit, job)
  save_credit(KEYS[9], credit, 1)
else
  count_drained(job)
end
redis.call('HSET', KEYS[AT], 'cancel', '1')
conclude(AT, id, job, now, {
  state = 'cancelled', result = ARGV[4], finale = ARGV[5], done_key = KEYS[6],
})
save_load(KEYS[4], now)
save_usage(KEYS[19] or string.sub(KEYS[4], 1, -5) .. 'usage', now)
if job.state == 'dispatched' then
  redis.call('PUBLISH', KEYS[7], 'room')
end
return 'cancelled'
