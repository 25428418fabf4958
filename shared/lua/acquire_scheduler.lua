-- acquire_scheduler: takes or renews the lease of the active scheduler.
--
-- Fences only rise: the first is the time in seconds, so that after a flush it is
-- above all before it, and whoever led then notices.
--
-- KEYS 1 scheduler  hash  owner, fence, until (ms); kept for ever
-- ARGV 1 owner, 2 lease in ms
-- Returns the fence number while the owner holds the lease, else 0.
--include clock
local now = now_ms()
local held = redis.call('HMGET', KEYS[1], 'owner', 'fence', 'until')
local fence = tonumber(held[2]) or math.floor(now / 1000)
if held[1] ~= ARGV[1] then
  if held[1] and held[1] ~= '' and (tonumber(held[3]) or 0) > now then
    return 0
  end
  fence = fence + 1
end
-- A removal goes first, here of nothing: a server without memory then still has a leader.
redis.call('HDEL', KEYS[1], '')
redis.call(
  'HSET', KEYS[1], 'owner', ARGV[1], 'fence', fence, 'until', now + tonumber(ARGV[2])
)
return fence
