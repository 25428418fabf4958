-- bulk_create: makes a run's record, once; a driver begins, so that how many items there
-- are is open until it has fed them all.
--
-- KEYS 1 run  hash  the spec and the counters
-- ARGV 1 ms to live, 2 JSON RunSpec
-- Returns new, known (the same spec), or other (another spec: nothing was changed).
--include bulk
--include clock
local before = redis.call('HGET', KEYS[1], 'spec')
if before then
  touch(KEYS[1])
  if before ~= ARGV[2] then
    return 'other'
  end
  redis.call('HDEL', KEYS[1], 'total')
  return 'known'
end
local now = now_ms()
redis.call(
  'HSET', KEYS[1], 'spec', ARGV[2], 'state', 'open', 'created_ms', now,
  'updated_ms', now, 'driver_ms', now, 'renewed_ms', now
)
touch(KEYS[1])
return 'new'
