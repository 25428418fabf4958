-- register: a worker group offers its capacity. Credit is the whole capacity less what
-- its live jobs hold, so that coming back after a silence counts nothing twice.
--
-- KEYS 1 group   hash     made here; expires unless renewed
--      2 groups  zset     group -> ms of its last heartbeat
--      3 bell    channel  to the scheduler
--      then job:<id> hash of each job that might be this group's
-- ARGV 1 group, 2 time to live in ms, 3 total blocks, 4 most running sequences,
--      5 prefill token budget; then pairs of field and value
-- Returns now in ms.
--include clock
--include record
local FIELDS = {
  'state', 'owner', 'cost_blocks', 'cost_running', 'cost_tokens', 'credit_tokens_back',
}
local now = now_ms()
local blocks, running = tonumber(ARGV[3]), tonumber(ARGV[4])
local tokens = tonumber(ARGV[5])
for k = 4, #KEYS do
  local job = read_job(KEYS[k], FIELDS)
  if job and job.owner == ARGV[1]
    and (job.state == 'running' or job.state == 'dispatched') then
    blocks = blocks - (tonumber(job.cost_blocks) or 0)
    running = running - (tonumber(job.cost_running) or 1)
    if job.credit_tokens_back ~= '1' then
      tokens = tokens - (tonumber(job.cost_tokens) or 0)
    end
  end
end
redis.call(
  'HSET', KEYS[1], 'group', ARGV[1], 'total_blocks', ARGV[3], 'max_running', ARGV[4],
  'batch_tokens', ARGV[5], 'credit_blocks', blocks, 'credit_running', running,
  'credit_tokens', tokens, 'heartbeat_ms', now, unpack(ARGV, 6)
)
redis.call('PEXPIRE', KEYS[1], ARGV[2])
redis.call('ZADD', KEYS[2], now, ARGV[1])
redis.call('PUBLISH', KEYS[3], 'group')
return now
