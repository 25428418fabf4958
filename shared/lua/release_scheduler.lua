-- release_scheduler: gives the lease of the active scheduler up, so that a standby
-- takes over at once.
--
-- KEYS 1 scheduler  hash  owner, fence, until (ms)
-- ARGV 1 owner
-- Returns 1 when the owner held the lease, else 0.
if redis.call('HGET', KEYS[1], 'owner') ~= ARGV[1] then
  return 0
end
redis.call('HDEL', KEYS[1], '') -- first, as in acquire_scheduler
redis.call('HSET', KEYS[1], 'owner', '', 'until', 0)
return 1
