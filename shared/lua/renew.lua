-- renew: a worker group extends the leases of all its jobs, once per heartbeat.
--
-- KEYS 1 lease  zset  job id -> ms at which its lease ends
--      then job:<id> hash for each job
-- ARGV 1 group, 2 lease in ms, 3 number of jobs; then two for each: id, epoch
-- Returns one for each job: held, lost, or cancelled (held, but to be stopped).
--include clock
--include record
local FIELDS = { 'state', 'epoch', 'owner', 'cancel' }
local replies, leases = {}, {}
local until_ms = now_ms() + tonumber(ARGV[2])
for i = 1, tonumber(ARGV[3]) do
  local job = read_job(KEYS[1 + i], FIELDS)
  if held_by(job, ARGV[1], ARGV[3 + 2 * i]) then
    leases[#leases + 1] = until_ms
    leases[#leases + 1] = ARGV[2 + 2 * i]
    replies[i] = job.cancel == '1' and 'cancelled' or 'held'
  else
    replies[i] = 'lost'
  end
end
if #leases > 0 then
  redis.call('ZADD', KEYS[1], 'XX', unpack(leases))
end
return replies
