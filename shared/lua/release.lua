-- release: a draining group hands jobs back to the queue at no cost to them.
--
-- KEYS 1 lease     zset     job id -> ms at which its lease ends
--      2 deadline  zset     job id -> ms of its deadline
--      3 load      hash     counters of waiting work
--      4 done      stream   terminal events, trimmed
--      5 bell      channel  to the scheduler
--      6 group     hash     gets the jobs' credit back
--      7 work      stream   the group's work
--      8 resume    stream   where the jobs go, read first
--      9 usage     hash     what tenants have used, by day
--      then seven for each job: job hash, in string, ids string, out string,
--      tok stream, wake channel, idem string (the job hash again when it has none)
-- ARGV 1 group, 2 number of jobs; then four for each: id, epoch, result and end marker
--      for a job whose cancel was asked for meanwhile
-- Returns one for each job: released, cancelled, lost, or keys.
--include clock
--include record
--include load
--include credit
--include usage
--include ending
--include requeue
local HEAD, WIDTH, KEYS_HEAD, KEYS_WIDTH = 2, 4, 9, 7
local group, now, replies, credit = ARGV[1], now_ms(), {}, new_credit()

local function release(a, k)
  local id, at = ARGV[a + 1], k + 1
  local job = read_job(KEYS[at], REQUEUE_FIELDS)
  if not held_by(job, group, ARGV[a + 2]) then
    return 'lost'
  elseif not knows_idem(at, job) then
    return 'keys'
  end
  redis.call('ZREM', KEYS[1], id)
  if job.entry ~= '' then
    redis.pcall('XDEL', KEYS[7], job.entry)
  end
  give_back(credit, job)
  if job.cancel == '1' then
    if job.deadline ~= '' then
      redis.call('ZREM', KEYS[2], id)
    end
    conclude(at, id, job, now, {
      state = 'cancelled', result = ARGV[a + 3], finale = ARGV[a + 4],
      done_key = KEYS[4],
    })
    return 'cancelled'
  end
  fence(at, job)
  requeue(at, id, job, KEYS[8], 'release')
  count_waiting(job, 1)
  return 'released'
end

for i = 1, tonumber(ARGV[2]) do
  replies[i] = release(HEAD + (i - 1) * WIDTH, KEYS_HEAD + (i - 1) * KEYS_WIDTH)
end
if credit.all.running > 0 then
  save_credit(KEYS[6], credit, 1)
  save_load(KEYS[3], now)
  save_usage(KEYS[9], now)
  redis.call('PUBLISH', KEYS[5], 'release')
end
return replies
