-- dead_letter: takes an entry that cannot be understood out of a waiting stream.
--
-- KEYS 1 entry  stream  that holds it
--      2 dlq    stream  dead letters, trimmed
--      3 lanes  zset    lanes with waiting entries
-- ARGV 1 stream id, 2 reason, 3 member of `lanes` for this stream, or ''
-- Returns 1 when the entry was there, else 0.
--include lanes
local DEAD_LENGTH, MOST_FIELDS, MOST_BYTES = 10000, 32, 4096
local found = redis.pcall('XRANGE', KEYS[1], ARGV[1], ARGV[1])
if found.err or not found[1] then
  return 0
end
local copy = { 'stream', KEYS[1], 'entry', ARGV[1], 'reason', ARGV[2] }
local fields = found[1][2]
for i = 1, math.min(#fields, 2 * MOST_FIELDS), 2 do
  copy[#copy + 1] = 'raw:' .. string.sub(fields[i], 1, 256)
  copy[#copy + 1] = string.sub(fields[i + 1], 1, MOST_BYTES)
end
redis.pcall('XDEL', KEYS[1], ARGV[1])
redis.pcall('XADD', KEYS[2], 'MAXLEN', '~', DEAD_LENGTH, '*', unpack(copy))
if ARGV[3] ~= '' then
  refresh_lane(KEYS[3], KEYS[1])
end
return 1
