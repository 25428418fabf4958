-- heartbeat: a worker group is alive and says how it is.
--
-- KEYS 1 group   hash     renewed
--      2 groups  zset     group -> ms of its last heartbeat
--      3 bell    channel  to the scheduler, when there is new room
-- ARGV 1 group, 2 time to live in ms, 3 total blocks, 4 most running sequences,
--      5 prefill token budget; then pairs of field and value
-- Returns now in ms, or 0 when the group has expired and must register again.
--include clock
local now = now_ms()
local before = redis.call(
  'HMGET', KEYS[1], 'total_blocks', 'max_running', 'batch_tokens', 'state'
)
if not before[1] then
  return 0
end
local names = { 'total_blocks', 'max_running', 'batch_tokens' }
local credits = { 'credit_blocks', 'credit_running', 'credit_tokens' }
local grown = false
for i = 1, 3 do
  local change = tonumber(ARGV[2 + i]) - (tonumber(before[i]) or 0)
  if change ~= 0 then
    grown = grown or change > 0
    redis.call('HSET', KEYS[1], names[i], ARGV[2 + i])
    redis.call('HINCRBY', KEYS[1], credits[i], change)
  end
end
redis.call('HSET', KEYS[1], 'heartbeat_ms', now, unpack(ARGV, 6))
redis.call('PEXPIRE', KEYS[1], ARGV[2])
redis.call('ZADD', KEYS[2], now, ARGV[1])
if grown or redis.call('HGET', KEYS[1], 'state') ~= before[4] then
  redis.call('PUBLISH', KEYS[3], 'group')
end
return now
