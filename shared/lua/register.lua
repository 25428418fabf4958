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
--include credit
local FIELDS = { 'state', 'owner', unpack(CREDIT_FIELDS) }
local now, alone, held = now_ms(), '', new_credit()
for k = 4, #KEYS do
  local job = read_job(KEYS[k], FIELDS)
  if job and job.owner == ARGV[1]
    and (job.state == 'running' or job.state == 'dispatched') then
    add_credit(held, job.class, held_of(job))
    if job.alone == '1' then
      alone = string.match(KEYS[k], ':job:(.*)$') or ''
    end
  end
end
local function left_of(total, name)
  return string.format('%.0f', tonumber(total) - held.all[name])
end
redis.call(
  'HSET', KEYS[1], 'group', ARGV[1], 'total_blocks', ARGV[3], 'max_running', ARGV[4],
  'batch_tokens', ARGV[5], 'credit_blocks', left_of(ARGV[3], 'blocks'),
  'credit_running', left_of(ARGV[4], 'running'),
  'credit_tokens', left_of(ARGV[5], 'tokens'), 'bulk_blocks', held.bulk.blocks,
  'bulk_running', held.bulk.running,
  'bulk_tokens', string.format('%.0f', held.bulk.tokens), 'alone', alone,
  'heartbeat_ms', now, unpack(ARGV, 6)
)
redis.call('PEXPIRE', KEYS[1], ARGV[2])
redis.call('ZADD', KEYS[2], now, ARGV[1])
redis.call('PUBLISH', KEYS[3], 'group')
return now
