-- reject: the active scheduler ends a queued job that can never run.
--
-- KEYS 1 scheduler hash     fence of the active scheduler
--      2 deadline  zset     job id -> ms of its deadline
--      3 load      hash     counters of waiting work
--      4 lanes     zset     lanes with waiting entries
--      5 done      stream   terminal events, trimmed
--      6 resume    stream   redelivered jobs
--      7 entry     stream   that holds the job's entry
--      8 usage     hash     what tenants have used, by day
--      then seven: job hash, in string, ids string, out string, tok stream,
--      wake channel, idem string (the job hash again when it has none)
-- ARGV 1 fence, 2 id, 3 state (failed or expired), 4 stream of the entry as last read,
--      5 JSON JobResult, 6 JSON Delta with `end`, 7 stream id of the entry that is to
--      be the job's, or '' where that does not matter
-- Returns rejected, fenced, gone (not queued any more), or keys (ask again).
--include clock
--include record
--include load
--include lanes
--include usage
--include ending
local AT = 9
local FIELDS = {
  'state', 'epoch', 'owner', 'keep_ms', 'idem', 'deadline', 'class', 'tenant',
  'tokens', 'bytes', 'entry', 'entry_key', 'webhook',
}
if redis.call('HGET', KEYS[1], 'fence') ~= ARGV[1] then
  return 'fenced'
end
local id, now = ARGV[2], now_ms()
local job = read_job(KEYS[AT], FIELDS)
if not job or job.state ~= 'queued' or (ARGV[3] ~= 'failed' and ARGV[3] ~= 'expired') then
  return 'gone'
elseif ARGV[7] ~= '' and job.entry ~= ARGV[7] then
  return 'gone' -- a stranger's entry that names another's job
elseif job.entry_key ~= ARGV[4] or not knows_idem(AT, job) then
  return 'keys'
end
redis.pcall('XDEL', KEYS[7], job.entry)
redis.call('ZREM', KEYS[2], id)
if job.entry_key ~= KEYS[6] then
  refresh_lane(KEYS[4], KEYS[7])
end
count_drained(job)
conclude(AT, id, job, now, {
  state = ARGV[3], result = ARGV[5], finale = ARGV[6], reason = ARGV[5],
  done_key = KEYS[5],
})
save_load(KEYS[3], now)
save_usage(KEYS[8], now)
return 'rejected'
