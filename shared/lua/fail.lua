-- fail: an application fault of one running job: again later, or never.
--
-- KEYS 1 lease     zset     job id -> ms at which its lease ends
--      2 deadline  zset     job id -> ms of its deadline
--      3 delayed   zset     job id -> ms at which it is due
--      4 load      hash     counters of waiting work
--      5 done      stream   terminal events, trimmed
--      6 dlq       stream   dead letters, trimmed
--      7 bell      channel  to the scheduler
--      8 group     hash     gets the job's credit back
--      9 usage     hash     what tenants have used, by day
--      then seven: job hash, in string, ids string, out string, tok stream,
--      wake channel, idem string (the job hash again when it has none)
-- ARGV 1 group, 2 id, 3 epoch, 4 JSON JobError, 5 delay in ms, 6 most attempts,
--      7 result and 8 end marker when attempts are used up,
--      9 result and 10 end marker when a cancel was asked for meanwhile,
--      11 ms that a dead letter's record, input and result stay
-- Returns retrying, failed, cancelled, lost, or keys.
--include clock
--include record
--include load
--include credit
--include usage
--include ending
local AT = 10
local FIELDS = {
  'state', 'epoch', 'owner', 'cancel', 'keep_ms', 'idem', 'deadline', 'tenant',
  'tokens', 'bytes', 'attempts', 'webhook', unpack(CREDIT_FIELDS),
}
local id, now, credit = ARGV[2], now_ms(), new_credit()
local job = read_job(KEYS[AT], FIELDS)
if not held_by(job, ARGV[1], ARGV[3]) or job.state ~= 'running' then
  return 'lost'
elseif not knows_idem(AT, job) then
  return 'keys'
end
local attempts = (tonumber(job.attempts) or 0) + 1
local outcome = 'retrying'
if job.cancel == '1' then
  outcome = 'cancelled'
elseif attempts >= (tonumber(ARGV[6]) or 1) then
  outcome = 'failed'
end
redis.call('ZREM', KEYS[1], id)
redis.call('HSET', KEYS[AT], 'attempts', attempts, 'last_error', ARGV[4])
if outcome == 'retrying' then
  fence(AT, job)
  redis.call('HSET', KEYS[AT], 'state', 'retrying', 'owner', '', 'batch', '')
  redis.call('ZADD', KEYS[3], now + math.max(tonumber(ARGV[5]) or 0, 0), id)
  count_waiting(job, 1, LATER)
else
  local cancelled = outcome == 'cancelled'
  local dead = not cancelled and job.tenant ~= SHADOW
  if job.deadline ~= '' then
    redis.call('ZREM', KEYS[2], id)
  end
  conclude(AT, id, job, now, {
    state = outcome, result = cancelled and ARGV[9] or ARGV[7],
    finale = cancelled and ARGV[10] or ARGV[8], reason = ARGV[4], done_key = KEYS[5],
    told_by = ARGV[1], dead_ms = dead and ARGV[11] or nil,
  })
  if dead then
    bury(KEYS[6], id, 'attempts', ARGV[4])
  end
  save_usage(KEYS[9], now)
end
give_back(credit, job)
save_credit(KEYS[8], credit, 1)
save_load(KEYS[4], now)
redis.call('PUBLISH', KEYS[7], 'room')
return outcome
