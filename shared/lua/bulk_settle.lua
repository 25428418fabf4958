-- bulk_settle: the outcomes of items, once each.
--
-- KEYS 1 run     hash     the spec and the counters
--      2 ready   zset     seq -> seq of items with something to be done
--      3 open    set      job ids whose end is not recorded
--      4 unsent  set      those that may not have been enqueued yet
--      5 ended   set      those that are known to have ended
--      6 out     stream   outcomes that are not acknowledged
--      then one for each item: item:<seq>  hash
-- ARGV 1 ms to live, 2 JSON array, for each item: seq, generation, state (succeeded,
--      failed, cancelled), ids (its jobs that may be open), and what is added to the
--      run's counters: jobs, prompt, completion; then one JSON Outcome for each item
-- Returns 1 for each item that settled now, else 0.
--include bulk
--include clock
local HEAD = 6
local count = #KEYS - HEAD
local items = entries_of(ARGV[2], count)
if not items or #ARGV ~= 2 + count then
  return redis.error_reply('ERR tokenmill bulk_settle: expected an outcome an item')
end
local STATES = { succeeded = true, failed = true, cancelled = true }
for _, item in ipairs(items) do
  if not STATES[item.state] or type(item.ids) ~= 'table' then
    return redis.error_reply('ERR tokenmill bulk_settle: state or ids are wrong')
  end
end
local replies, ids, settled = {}, {}, 0
local added = { jobs = 0, prompt_tokens = 0, completion_tokens = 0 }
for i, item in ipairs(items) do
  local key = KEYS[HEAD + i]
  replies[i] = 0
  if is_going(key, item.generation) then
    -- First, as the only write here that a server without memory refuses.
    local entry = redis.call('XADD', KEYS[6], '*', 'o', ARGV[2 + i])
    redis.call('DEL', key)
    redis.call(
      'HSET', key, 'generation', item.generation, 'state', 'settled', 'entry', entry,
      'as', item.state
    )
    touch(key)
    redis.call('ZREM', KEYS[2], item.seq)
    redis.call('HINCRBY', KEYS[1], item.state, 1)
    added.jobs = added.jobs + item.jobs
    added.prompt_tokens = added.prompt_tokens + item.prompt
    added.completion_tokens = added.completion_tokens + item.completion
    replies[i], settled = 1, settled + 1
  end
  for _, id in ipairs(item.ids) do
    ids[#ids + 1] = id
  end
end
for at = 3, 5 do
  each_part('SREM', KEYS[at], ids)
end
if settled > 0 then
  redis.call('HINCRBY', KEYS[1], 'settled', settled)
  for name, number in pairs(added) do
    redis.call('HINCRBY', KEYS[1], name, number)
  end
  redis.call('HSET', KEYS[1], 'updated_ms', now_ms())
end
touch(KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5], KEYS[6])
return replies
