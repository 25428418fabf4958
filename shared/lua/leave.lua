-- leave: a worker group goes. Its leases are not touched: jobs it still holds are
-- redelivered when they end.
--
-- KEYS 1 group   hash    removed
--      2 groups  zset    group -> ms of its last heartbeat
--      3 work    stream  removed: what is in it is still covered by leases
-- ARGV 1 group, 2 `1` to go only if the group's hash has expired
-- Returns 1 when the group was known, else 0.
if ARGV[2] == '1' and redis.call('EXISTS', KEYS[1]) == 1 then
  return 0
end
redis.call('DEL', KEYS[1], KEYS[3])
return redis.call('ZREM', KEYS[2], ARGV[1])
