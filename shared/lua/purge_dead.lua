-- purge_dead: takes letters out of the dead letters. What a job's letter kept longer
-- (record, input and result) goes when that of any other job would have gone.
--
-- KEYS 1 dlq  stream  dead letters
--      then three for each letter: job hash, in string, out string (the stream again,
--      three times, for a letter that is of no job)
-- ARGV 1 number of letters; then two for each: its stream id, job id or ''
-- Returns one for each letter: 1 when it was there, else 0.
--include clock
--include record
--include ending
local FIELDS = { 'state', 'keep_ms', 'finished_ms' }
local now, replies = now_ms(), {}

-- Never longer than until now: a purge repeated, or late, must not bring time back.
local function let_go(k)
  local job = read_job(KEYS[k], FIELDS)
  if not job or job.state ~= 'failed' then
    return
  end
  local left = (tonumber(job.finished_ms) or now) + keep_of(job) - now
  for i = k, k + 2 do
    local expires = redis.call('PTTL', KEYS[i])
    if expires > left then
      redis.call('PEXPIRE', KEYS[i], string.format('%.0f', math.max(left, 0)))
    end
  end
end

for i = 1, tonumber(ARGV[1]) do
  local letter, id = ARGV[2 * i], ARGV[2 * i + 1]
  local found = redis.pcall('XRANGE', KEYS[1], letter, letter)
  replies[i] = 0
  -- The letter must be that job's own: else a caller could shorten another's time.
  if not found.err and found[1] then
    local named = found[1][2][1] == 'id' and found[1][2][2] or ''
    if named == id then
      redis.call('XDEL', KEYS[1], letter)
      replies[i] = 1
      if id ~= '' then
        let_go(3 * i - 1)
      end
    end
  end
end
return replies
