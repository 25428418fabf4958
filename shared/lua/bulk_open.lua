-- bulk_open: notes jobs that are about to be enqueued, so that none is ever unheard of.
--
-- KEYS 1 run     hash  the spec and the counters
--      2 ready   zset  seq -> seq of items with something to be done
--      3 open    set   job ids whose end is not recorded
--      4 unsent  set   those that may not have been enqueued yet
--      then one for each item: item:<seq>  hash
-- ARGV 1 ms to live, 2 JSON array, for each item: seq, generation, from (the item's
--      cursor as last read), to (its next value), more (whether the item has jobs left
--      to be opened), ids, set (fields of the item to be written), windows (added to
--      the run's count)
-- Returns 1 for each item, or 0 when it has moved meanwhile; nothing was changed then.
--include bulk
local HEAD = 4
local count = #KEYS - HEAD
local items = entries_of(ARGV[2], count)
if not items then
  return redis.error_reply('ERR tokenmill bulk_open: expected an array of the items')
end
local replies = {}
for i, item in ipairs(items) do
  local key = KEYS[HEAD + i]
  local cursor = redis.call('HGET', key, 'cursor') or ''
  local open = redis.call('HGET', KEYS[1], 'state') == 'open'
  if not open or cursor ~= item.from or not is_going(key, item.generation) then
    replies[i] = 0
  else
    each_part('SADD', KEYS[3], item.ids)
    each_part('SADD', KEYS[4], item.ids)
    redis.call('HSET', key, 'cursor', item.to, 'state', 'open')
    for field, value in pairs(item.set or {}) do
      redis.call('HSET', key, field, value)
    end
    if not item.more then
      redis.call('ZREM', KEYS[2], item.seq)
    end
    if item.windows > 0 then
      redis.call('HINCRBY', KEYS[1], 'windows', item.windows)
    end
    touch(key)
    replies[i] = 1
  end
end
touch(KEYS[1], KEYS[2], KEYS[3], KEYS[4])
return replies
