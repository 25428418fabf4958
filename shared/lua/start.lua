-- start: a worker group takes jobs that were dispatched to it.
--
-- KEYS 1 lease  zset    job id -> ms at which its lease ends
--      2 work   stream  the group's work
--      then four for each job: job:<id> hash, in:<id> string, ids:<id> string,
--      tok:<id> stream (made here)
-- ARGV 1 group, 2 lease in ms, 3 number of jobs; then three for each:
--      id, epoch, stream id of its entry in `work`
-- Returns one array for each job: {status} or {'started', payload, token ids, seed,
--      class, priority, tenant, attempts, lease losses, enqueued ms, started ms,
--      first ms, deadline ms, weights, delta, delta, ...} where the deltas are the log
--      of earlier epochs. Status: started (again when repeated), lost, cancelled.
--include clock
--include record
--include refused
local HEAD, WIDTH, KEYS_HEAD, KEYS_WIDTH = 3, 3, 2, 4
local FIELDS = {
  'state', 'epoch', 'owner', 'cancel', 'seed', 'class', 'priority', 'tenant',
  'attempts', 'lease_losses', 'enqueued_ms', 'started_ms', 'first_ms', 'deadline',
  'weights', 'entry', 'start_losses',
}
local group, count = ARGV[1], tonumber(ARGV[3])
local now = now_ms()
local until_ms, leases, replies = now + tonumber(ARGV[2]), {}, {}

local function append_log(reply, key, epoch)
  -- An error, where a stranger made the log another type, has no elements.
  for _, entry in ipairs(redis.pcall('XRANGE', key, '-', epoch .. '-0')) do
    if entry[2][1] == 'd' then
      reply[#reply + 1] = entry[2][2]
    end
  end
end

-- Makes the log and marks the job as running; nil when the log cannot be written.
local function take(k, job, epoch)
  local made = redis.pcall('XADD', KEYS[k + 4], epoch .. '-0', 'f', '1')
  if type(made) == 'table' and made.err then
    if refuses_writes(made.err) then
      return made
    end
    return nil
  end
  if job.started_ms == '' then
    job.started_ms = string.format('%.0f', now)
  end
  redis.call(
    'HSET', KEYS[k + 1], 'state', 'running', 'started_ms', job.started_ms,
    'entry', '', 'entry_key', ''
  )
  if job.start_losses ~= '' then
    redis.call('HDEL', KEYS[k + 1], 'start_losses')
  end
  return job
end

local function start(a, k)
  local id, epoch = ARGV[a + 1], ARGV[a + 2]
  local job = read_job(KEYS[k + 1], FIELDS)
  if not held_by(job, group, epoch) then
    if ARGV[a + 3] ~= '' then
      redis.pcall('XDEL', KEYS[2], ARGV[a + 3])
    end
    return { job and job.state == 'cancelled' and 'cancelled' or 'lost' }
  elseif job.cancel == '1' then
    return { 'cancelled' }
  end
  local payload, ids = redis.pcall('GET', KEYS[k + 2]), redis.pcall('GET', KEYS[k + 3])
  if type(payload) == 'table' or type(ids) == 'table' then
    return { 'lost' } -- a stranger's keys; the scheduler gives such a job up
  end
  if job.state == 'dispatched' then
    local taken = take(k, job, epoch)
    if not taken then
      return { 'lost' }
    elseif taken.err then
      return taken
    end
    redis.pcall('XDEL', KEYS[2], job.entry)
  end
  leases[#leases + 1] = until_ms
  leases[#leases + 1] = id
  local reply = {
    'started', payload or '', ids or '', job.seed, job.class, job.priority,
    job.tenant, job.attempts, job.lease_losses, job.enqueued_ms, job.started_ms,
    job.first_ms, job.deadline, job.weights,
  }
  if job.first_ms ~= '' then
    append_log(reply, KEYS[k + 4], epoch)
  end
  return reply
end

for i = 1, count do
  local reply = start(HEAD + (i - 1) * WIDTH, KEYS_HEAD + (i - 1) * KEYS_WIDTH)
  if reply.err then
    if #leases == 0 then
      return reply -- no memory and nothing written yet: refuse the whole call
    end
    reply = { 'lost' }
  end
  replies[i] = reply
end
if #leases > 0 then
  redis.call('ZADD', KEYS[1], unpack(leases))
end
return replies
