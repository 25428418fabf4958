-- bulk_mark: notes which of a run's open jobs have ended, or are not in the queue.
--
-- KEYS 1 open  set  job ids whose end is not recorded
--      2 set   set  of those: `ended`, or `unsent`
-- ARGV 1 ms to live, then job ids
-- Returns how many of them are open.
--include bulk
local found = {}
for i = 2, #ARGV do
  if redis.call('SISMEMBER', KEYS[1], ARGV[i]) == 1 then
    found[#found + 1] = ARGV[i]
  end
end
each_part('SADD', KEYS[2], found)
touch(KEYS[2])
return #found
