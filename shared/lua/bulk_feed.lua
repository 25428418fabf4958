-- bulk_feed: gives a run items. Safe to repeat.
--
-- KEYS 1 run    hash    the spec and the counters
--      2 ready  zset    seq -> seq of items with something to be done
--      3 out    stream  outcomes that are not acknowledged
--      then one for each item: item:<seq>  hash
-- ARGV 1 ms to live; then four for each item: seq, generation, JSON Item, and how the
--      generation before settled in this run (failed, cancelled), where its outcome is
--      acknowledged, else empty
-- Returns unknown (no such run), or one word for each item: new, known (this generation
--      or a later one was fed before, or an earlier one has not settled), closed (the
--      run is cancelled).
--include bulk
--include clock
local HEAD, WIDTH = 3, 4
local count = #KEYS - HEAD
if #ARGV ~= 1 + count * WIDTH then
  return redis.error_reply('ERR tokenmill bulk_feed: expected 4 arguments an item')
end
local STATES = { 'succeeded', 'failed', 'cancelled' }
local state = redis.call('HGET', KEYS[1], 'state')
if not state then
  return 'unknown'
end
local replies, fed, unread = {}, 0, 0
local left, again = {}, {}
for i, count_of in ipairs(redis.call('HMGET', KEYS[1], unpack(STATES))) do
  left[STATES[i]], again[STATES[i]] = tonumber(count_of or '0'), 0
end

-- A later generation takes the place of one that settled before and was counted.
local function count_new(settled_as)
  if again[settled_as] and again[settled_as] < left[settled_as] then
    again[settled_as] = again[settled_as] + 1
  else
    fed = fed + 1
  end
end

for i = 1, count do
  local key, at = KEYS[HEAD + i], 1 + (i - 1) * WIDTH
  local seq, generation, body = ARGV[at + 1], tonumber(ARGV[at + 2]), ARGV[at + 3]
  local before = redis.call('HMGET', key, 'generation', 'state', 'entry', 'as')
  local older = before[1] and tonumber(before[1]) < generation
  if state ~= 'open' then
    replies[i] = 'closed'
  elseif before[1] and not (older and before[2] == 'settled') then
    replies[i] = 'known'
  else
    redis.call('ZADD', KEYS[2], seq, seq)
    if before[3] then
      redis.call('XDEL', KEYS[3], before[3]) -- the driver goes on without having read it
      unread = unread + 1
    end
    redis.call('DEL', key)
    redis.call(
      'HSET', key, 'generation', generation, 'state', 'ready', 'fed_ms', now_ms(),
      'item', body
    )
    touch(key)
    count_new(before[4] or ARGV[at + 4])
    replies[i] = 'new'
  end
end
-- Never of 0: Redis 6.2 takes Lua's -0 for no number.
local function lower(counter, by)
  if by > 0 then
    redis.call('HINCRBY', KEYS[1], counter, -by)
  end
end

local replaced = 0
for name, number in pairs(again) do
  lower(name, number)
  replaced = replaced + number
end
redis.call('HINCRBY', KEYS[1], 'fed', fed)
lower('settled', replaced)
lower('acknowledged', replaced - unread)
redis.call('HSET', KEYS[1], 'updated_ms', now_ms(), 'driver_ms', now_ms())
touch(KEYS[1], KEYS[2])
return replies
