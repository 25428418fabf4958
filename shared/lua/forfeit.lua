-- forfeit: the leases of a group that is known to be dead end now, and why.
--
-- KEYS 1 lease  zset     job id -> ms at which its lease ends
--      2 bell   channel  to the scheduler
--      then job:<id> hash of each job that might be this group's
-- ARGV 1 group, 2 cause in words, or '', 3 `1` if the loss counts against jobs that ran,
--      else `0`; then the id of each job
-- Returns the number of leases ended.
--
-- What is known is noted in the record as `<epoch> <1 or 0> <cause>`: it is true of this
-- run alone. Who reported first knew most.
--include clock
--include record
local HEAD = 3
local FIELDS = { 'state', 'owner', 'epoch', 'lost' }
local now, ended = now_ms(), 0
for i = HEAD + 1, #ARGV do
  local key = KEYS[2 + i - HEAD]
  local job = read_job(key, FIELDS)
  if job and job.owner == ARGV[1]
    and (job.state == 'running' or job.state == 'dispatched') then
    redis.call('ZADD', KEYS[1], 'XX', now, ARGV[i])
    if string.match(job.lost, '^(%d+) ') ~= job.epoch then
      redis.call('HSET', key, 'lost', job.epoch .. ' ' .. ARGV[3] .. ' ' .. ARGV[2])
    end
    ended = ended + 1
  end
end
if ended > 0 then
  redis.call('PUBLISH', KEYS[2], 'reap')
end
return ended
