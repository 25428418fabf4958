-- bulk_ack: outcomes are safe with the driver; what is left of their items goes.
--
-- KEYS 1 run  hash    the spec and the counters
--      2 out  stream  outcomes that are not acknowledged
--      then one for each item: item:<seq>  hash
-- ARGV 1 ms to live
-- Returns how many items went now.
--include bulk
--include clock
local gone = 0
for i = 3, #KEYS do
  local item = redis.call('HMGET', KEYS[i], 'state', 'entry')
  if item[1] == 'settled' then
    redis.call('XDEL', KEYS[2], item[2])
    redis.call('DEL', KEYS[i])
    gone = gone + 1
  end
end
if redis.call('EXISTS', KEYS[1]) == 1 then
  redis.call('HINCRBY', KEYS[1], 'acknowledged', gone)
  redis.call('HSET', KEYS[1], 'driver_ms', now_ms())
end
touch(KEYS[1], KEYS[2])
return gone
