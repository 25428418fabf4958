-- forfeit: the leases of a group that is known to be dead end now.
--
-- KEYS 1 lease  zset     job id -> ms at which its lease ends
--      2 bell   channel  to the scheduler
--      then job:<id> hash of each job that might be this group's
-- ARGV 1 group; then the id of each job
-- Returns the number of leases ended.
--include clock
--include record
local FIELDS = { 'state', 'owner' }
local now, ended = now_ms(), 0
for i = 2, #ARGV do
  local job = read_job(KEYS[1 + i], FIELDS)
  if job and job.owner == ARGV[1]
    and (job.state == 'running' or job.state == 'dispatched') then
    redis.call('ZADD', KEYS[1], 'XX', now, ARGV[i])
    ended = ended + 1
  end
end
if ended > 0 then
  redis.call('PUBLISH', KEYS[2], 'reap')
end
return ended
