-- finish: a worker group records how jobs ended. Once; a repeated call changes nothing.
--
-- KEYS 1 lease     zset     job id -> ms at which its lease ends
--      2 deadline  zset     job id -> ms of its deadline
--      3 load      hash     read: is anything waiting for the room?
--      4 done      stream   terminal events, trimmed
--      5 bell      channel  to the scheduler
--      6 group     hash     gets the job's credit back
--      7 work      stream   the group's work
--      8 usage     hash     what tenants have used, by day
--      then seven for each job: job hash, in string, ids string, out string,
--      tok stream, wake channel, idem string (the job hash again when it has none)
-- ARGV 1 group, 2 number of jobs; then seven for each: id, epoch, seq of the end
--      marker, state (succeeded, failed, cancelled, expired), JSON JobResult,
--      JSON Delta with `end`, last error or ''; at last 1 where the last deltas go
--      before in the same turn, else nothing
-- Returns one for each job: recorded, duplicate, lost, keys (the job has an idempotency
--      key that KEYS does not name: ask again with it), or held (its last delta, with the
--      seq before that of the end marker, was refused: send both again).
--include clock
--include record
--include credit
--include usage
--include ending
local HEAD, WIDTH, KEYS_HEAD, KEYS_WIDTH = 2, 7, 8, 7
local FIELDS = {
  'state', 'epoch', 'owner', 'keep_ms', 'idem', 'deadline', 'tenant', 'entry',
  'webhook', unpack(CREDIT_FIELDS),
}
local ENDINGS = { succeeded = true, failed = true, cancelled = true, expired = true }
local group, now, replies, credit = ARGV[1], now_ms(), {}, new_credit()

local follows = ARGV[HEAD + tonumber(ARGV[2]) * WIDTH + 1] == '1'

-- A log that is not there, or of another type, misses nothing.
local function misses_delta(log, epoch, seq)
  local last = redis.pcall('XREVRANGE', log, '+', '-', 'COUNT', 1)[1]
  local of, number = string.match(last and last[1] or '', '^(%d+)-(%d+)$')
  return of == epoch and tonumber(number) < (tonumber(seq) or 0) - 1
end

local function finish(a, k)
  local id, epoch, state = ARGV[a + 1], ARGV[a + 2], ARGV[a + 4]
  local job = read_job(KEYS[k + 1], FIELDS)
  if job and ENDINGS[job.state] and job.owner == group
    and tonumber(job.epoch) == (tonumber(epoch) or 0) + 1 then
    return 'duplicate'
  elseif not held_by(job, group, epoch) or not ENDINGS[state]
    or (job.state == 'dispatched' and state == 'succeeded') then
    return 'lost'
  elseif not knows_idem(k + 1, job) then
    return 'keys'
  elseif follows and misses_delta(KEYS[k + 5], epoch, ARGV[a + 3]) then
    return 'held'
  end
  -- A removal goes first, so that a server without memory still lets jobs end.
  redis.call('ZREM', KEYS[1], id)
  if job.deadline ~= '' then
    redis.call('ZREM', KEYS[2], id)
  end
  if job.entry ~= '' then
    redis.pcall('XDEL', KEYS[7], job.entry)
  end
  conclude(k + 1, id, job, now, {
    state = state, owner = group, result = ARGV[a + 5], finale = ARGV[a + 6],
    reason = ARGV[a + 7], log_id = epoch .. '-' .. ARGV[a + 3], done_key = KEYS[4],
  })
  give_back(credit, job)
  return 'recorded'
end

for i = 1, tonumber(ARGV[2]) do
  replies[i] = finish(HEAD + (i - 1) * WIDTH, KEYS_HEAD + (i - 1) * KEYS_WIDTH)
end
if credit.all.running > 0 then
  save_credit(KEYS[6], credit, 1)
  save_usage(KEYS[8], now)
  if redis.call('HEXISTS', KEYS[3], 'jobs') == 1 then
    redis.call('PUBLISH', KEYS[5], 'room')
  end
end
return replies
