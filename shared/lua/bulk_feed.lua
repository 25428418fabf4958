-- bulk_feed: gives a run items. Safe to repeat.
--
-- KEYS 1 run    hash    the spec and the counters
--      2 ready  zset    seq -> seq of items with something to be done
--      3 out    stream  outcomes that are not acknowledged
--      then one for each item: item:<seq>  hash
-- ARGV 1 ms to live; then three for each item: seq, generation, JSON Item
-- Returns unknown (no such run), or one word for each item: new, known (this generation
--      or a later one was fed before, or an earlier one has not settled), closed (the
--      run is cancelled).
--include bulk
--include clock
local HEAD, WIDTH = 3, 3
local count = #KEYS - HEAD
if #ARGV ~= 1 + count * WIDTH then
  return redis.error_reply('ERR tokenmill bulk_feed: expected 3 arguments an item')
end
local run = redis.call('HMGET', KEYS[1], 'state', 'failed', 'cancelled')
if not run[1] then
  return 'unknown'
end
local replies, fed, unread = {}, 0, 0
local failed, cancelled = tonumber(run[2] or '0'), tonumber(run[3] or '0')
local again = { failed = 0, cancelled = 0 }

-- A later generation takes the place of one that settled before.
local function count_new(generation)
  if generation > 0 and failed - again.failed > 0 then
    again.failed = again.failed + 1
  elseif generation > 0 and cancelled - again.cancelled > 0 then
    again.cancelled = again.cancelled + 1
  else
    fed = fed + 1
  end
end

for i = 1, count do
  local key, at = KEYS[HEAD + i], 1 + (i - 1) * WIDTH
  local seq, generation, body = ARGV[at + 1], tonumber(ARGV[at + 2]), ARGV[at + 3]
  local before = redis.call('HMGET', key, 'generation', 'state', 'entry')
  local older = before[1] and tonumber(before[1]) < generation
  if run[1] ~= 'open' then
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
    count_new(generation)
    replies[i] = 'new'
  end
end
-- Never of 0: Redis 6.2 takes Lua's -0 for no number.
local function lower(counter, by)
  if by > 0 then
    redis.call('HINCRBY', KEYS[1], counter, -by)
  end
end

redis.call('HINCRBY', KEYS[1], 'fed', fed)
lower('settled', again.failed + again.cancelled)
lower('acknowledged', again.failed + again.cancelled - unread)
lower('failed', again.failed)
lower('cancelled', again.cancelled)
redis.call('HSET', KEYS[1], 'updated_ms', now_ms(), 'driver_ms', now_ms())
touch(KEYS[1], KEYS[2])
return replies
