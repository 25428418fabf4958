-- overdue: what a reap should look at. Reads only.
--
-- KEYS 1 lease     zset  job id -> ms at which its lease ends
--      2 deadline  zset  job id -> ms of its deadline
--      3 delayed   zset  job id -> ms at which it is due
--      4 groups    zset  group -> ms of its last heartbeat
-- ARGV 1 most ids of each kind, 2 silence in ms after which a group is looked at
-- Returns now in ms, then four arrays: leases, deadlines, due, silent groups.
--include clock
local now = now_ms()
local reply = { now }
for i = 1, 4 do
  local before = i < 4 and now or now - tonumber(ARGV[2])
  reply[i + 1] = redis.call(
    'ZRANGEBYSCORE', KEYS[i], '-inf', before, 'LIMIT', 0, ARGV[1]
  )
end
return reply
