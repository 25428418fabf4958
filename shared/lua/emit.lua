-- emit: a worker group publishes deltas of running jobs.
--
-- KEYS 1 group  hash     gets the prefill credit back, at the first delta of each choice
--      2 load   hash     read: is anything waiting for that credit?
--      3 bell   channel  to the scheduler
--      then three for each delta: job:<id> hash, tok:<id> stream, wake:<id> channel
-- ARGV 1 group, 2 number of deltas; then four for each:
--      id, epoch, seq (from 1 within the epoch, rising), JSON Delta
-- Returns one for each delta: written, duplicate (seq is not new), lost, or cancelled
--      (written, but the job is to be stopped).
--include clock
--include record
--include refused
--include credit
local HEAD, WIDTH, KEYS_HEAD, KEYS_WIDTH = 2, 4, 3, 3
local FIELDS = {
  'state', 'epoch', 'owner', 'cancel', 'prefilled', 'first_ms', 'weights',
  unpack(CREDIT_FIELDS),
}
local group, replies, jobs = ARGV[1], {}, {}
local credit, wrote, mine = new_credit(), false, nil

-- Which choice a delta is of. Only jobs with several are looked into.
local function choice_of(job, delta)
  if (tonumber(job.cost_running) or 1) <= 1 then
    return '0'
  end
  local good, decoded = pcall(cjson.decode, delta)
  local choice = good and type(decoded) == 'table' and tonumber(decoded.choice) or 0
  return string.format('%.0f', choice)
end

-- A choice's first delta of an epoch: its prompt is computed, so that its part of the
-- prefill credit comes back; at the first of all, the weights are pinned. Which version
-- of the model serves it is written for people to see.
local function first_delta(key, job, delta)
  local choice = choice_of(job, delta)
  if string.find(job.prefilled, ',' .. choice .. ',', 1, true) then
    return
  end
  local held, choices = tonumber(job.cost_tokens) or 0, tonumber(job.cost_running) or 1
  local _, seen = string.gsub(job.prefilled, '%d+', '')
  local back = choices - seen > 1 and math.floor(held / (choices - seen)) or held
  add_credit(credit, job.class, { tokens = back })
  job.prefilled = (job.prefilled == '' and ',' or job.prefilled) .. choice .. ','
  job.cost_tokens = held - back
  job.credit_tokens_back = job.cost_tokens > 0 and '0' or '1'
  if job.first_ms == '' then
    job.first_ms = string.format('%.0f', now_ms())
  end
  mine = mine or redis.pcall('HMGET', KEYS[1], 'weights_version', 'version')
  if job.weights == '' then
    job.weights = mine[1] or ''
  end
  redis.call(
    'HSET', key, 'credit_tokens_back', job.credit_tokens_back, 'first_ms', job.first_ms,
    'weights', job.weights, 'served', mine[2] or '', 'prefilled', job.prefilled,
    'cost_tokens', string.format('%.0f', job.cost_tokens)
  )
end

local function emit(a, k)
  local key = KEYS[k + 1]
  if jobs[key] == nil then
    jobs[key] = read_job(key, FIELDS) or false
  end
  local job = jobs[key]
  if not job or job.state ~= 'running' or not held_by(job, group, ARGV[a + 2]) then
    return 'lost'
  end
  local written = redis.pcall(
    'XADD', KEYS[k + 2], 'NOMKSTREAM', ARGV[a + 2] .. '-' .. ARGV[a + 3],
    'd', ARGV[a + 4]
  )
  if type(written) == 'table' then
    if string.find(written.err, 'equal or smaller', 1, true) then
      return 'duplicate'
    elseif refuses_writes(written.err) and not wrote then
      return written
    end
    return 'lost'
  elseif not written then
    return 'lost' -- the log is gone
  end
  wrote = true
  redis.call('PUBLISH', KEYS[k + 3], ARGV[a + 4])
  if job.credit_tokens_back ~= '1' then
    first_delta(key, job, ARGV[a + 4])
  end
  return job.cancel == '1' and 'cancelled' or 'written'
end

for i = 1, tonumber(ARGV[2]) do
  local status = emit(HEAD + (i - 1) * WIDTH, KEYS_HEAD + (i - 1) * KEYS_WIDTH)
  if type(status) == 'table' then
    return status -- no memory and nothing written yet: refuse the whole call
  end
  replies[i] = status
end
if credit.all.tokens > 0 then
  save_credit(KEYS[1], credit, 1)
  if redis.call('HEXISTS', KEYS[2], 'jobs') == 1 then
    redis.call('PUBLISH', KEYS[3], 'room')
  end
end
return replies
