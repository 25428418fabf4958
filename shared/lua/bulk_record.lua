-- bulk_record: writes down what ended jobs gave their documents, once each.
--
-- KEYS 1 run     hash  the spec and the counters
--      2 ready   zset  seq -> seq of items with something to be done
--      3 open    set   job ids whose end is not recorded
--      4 unsent  set   those that may not have been enqueued yet
--      5 ended   set   those that are known to have ended
--      then one for each job: item:<seq>  hash
-- ARGV 1 ms to live, 2 JSON array, for each job: id, seq, generation, field (of the
--      item), value, level, of (jobs of this level), prompt, completion (tokens),
--      fell_back (0 or 1)
-- When the last job of a level is written down, the item is ready for the next.
-- Returns 1 for each job that was written down now, else 0.
--include bulk
--include clock
local HEAD = 5
local count = #KEYS - HEAD
local jobs = entries_of(ARGV[2], count)
if not jobs then
  return redis.error_reply('ERR tokenmill bulk_record: expected an array of the jobs')
end
local replies, ids = {}, {}
local new, prompt, completion, fell_back = 0, 0, 0, 0
for i, job in ipairs(jobs) do
  local key = KEYS[HEAD + i]
  ids[i], replies[i] = job.id, 0
  if is_going(key, job.generation)
    and redis.call('HSETNX', key, job.field, job.value) == 1 then
    replies[i], new = 1, new + 1
    prompt, completion = prompt + job.prompt, completion + job.completion
    fell_back = fell_back + job.fell_back
    local done = redis.call('HINCRBY', key, 'done:' .. job.level, 1)
    if done >= job.of then
      redis.call('ZADD', KEYS[2], job.seq, job.seq)
    end
    touch(key)
  end
end
-- A record that has expired is not made again of counters alone.
if redis.call('EXISTS', KEYS[1]) == 1 then
  redis.call('HINCRBY', KEYS[1], 'jobs', new)
  redis.call('HINCRBY', KEYS[1], 'prompt_tokens', prompt)
  redis.call('HINCRBY', KEYS[1], 'completion_tokens', completion)
  redis.call('HINCRBY', KEYS[1], 'fell_back', fell_back)
  redis.call('HSET', KEYS[1], 'updated_ms', now_ms())
end
for at = 3, 5 do
  each_part('SREM', KEYS[at], ids)
end
touch(KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5])
return replies
