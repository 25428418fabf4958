-- What may wait, and when there will be room. The scheduler writes the hash `limits`;
-- these are the values where it has written none (as in config.py).
local LIMITS = {
  { 'max_waiting_jobs', 100000 }, { 'max_waiting_tokens', 50000000 },
  { 'max_waiting_bytes', 1073741824 }, { 'tenant_waiting_jobs', 100000 },
  { 'tenant_waiting_tokens', 50000000 }, { 'tenant_tokens_per_minute', 0 },
  { 'max_payload_bytes', 4194304 }, { 'service_ms', 0 },
}
local LEAST_RETRY_MS, MOST_RETRY_MS, BLIND_RETRY_MS = 100, 60000, 5000
local MINUTE_MS = 60000 -- a tenant's allowance: so much may come at once
local FORGOTTEN = 0.01 -- drained jobs still remembered; fewer say nothing of a rate
local ENDS_STALE_MS = 15000 -- the scheduler writes the rate of ends every few seconds
local BULK_SHARE = 0.75 -- of each limit on what waits: the rest is left to others

local function read_limits(key, rates_key, load_key, now)
  local names = {}
  local limits = { key = key, rates_key = rates_key, now = now, tenants = {} }
  for i, limit in ipairs(LIMITS) do
    names[i] = limit[1]
  end
  local values = redis.pcall('HMGET', key, unpack(names))
  for i, limit in ipairs(LIMITS) do
    limits[limit[1]] = tonumber(values[i] or '') or limit[2]
  end
  local load = redis.call(
    'HMGET', load_key, 'jobs', 'tokens', 'bytes', 'tenants', 'class:interactive:tokens',
    'rate_jobs', 'rate_tokens', 'rate_busy', 'rate_ms', 'rate_from',
    LATER .. 'jobs', LATER .. 'tokens', LATER .. 'bytes', 'rate_ends', 'rate_ends_ms'
  )
  local function loaded(i)
    return tonumber(load[i]) or 0
  end
  limits.load_key = load_key
  -- Limits are on all that waits; queued work alone is before others.
  limits.jobs, limits.tokens = loaded(1) + loaded(11), loaded(2) + loaded(12)
  limits.bytes, limits.waiting_tenants = loaded(3) + loaded(13), loaded(4)
  limits.queued_tokens, limits.interactive = loaded(2), loaded(5)
  limits.stalled_ms = load[9] and load[10] and now - load[10] or 0
  local jobs = decay(load[6], load[9], now)
  if jobs >= FORGOTTEN then
    local busy = math.max(busy_ms(load[8], load[9], load[10], now), 1)
    limits.jobs_per_ms = jobs / busy
    limits.tokens_per_ms = decay(load[7], load[9], now) / busy
  end
  if loaded(14) > 0 and now - loaded(15) <= ENDS_STALE_MS then
    limits.ends_per_ms = loaded(14) / 1000
  end
  return limits
end

-- How much of a limit on what waits a job may use: bulk leaves room to other classes.
local function most_of(limit, job)
  return job.class == 'bulk' and math.max(math.floor(limit * BULK_SHARE), 1) or limit
end

local function limit_text(limit, job)
  if job.class ~= 'bulk' then
    return string.format('the limit is %d', limit)
  end
  return string.format('the limit is %d for bulk, three quarters of %d',
    most_of(limit, job), limit)
end

-- A tenant's own limits and what it has waiting, read once in a call.
local function tenant_of(limits, name)
  local tenant = limits.tenants[name]
  if tenant then
    return tenant
  end
  local head = 'tenant:' .. name .. ':'
  local own = redis.pcall(
    'HMGET', limits.key, head .. 'waiting_jobs', head .. 'waiting_tokens',
    head .. 'tokens_per_minute'
  )
  local later = LATER .. head
  local has = redis.call(
    'HMGET', limits.load_key, head .. 'jobs', head .. 'tokens', later .. 'jobs',
    later .. 'tokens'
  )
  local jobs, tokens = tonumber(has[1]) or 0, tonumber(has[2]) or 0
  tenant = {
    max_jobs = tonumber(own[1] or '') or limits.tenant_waiting_jobs,
    max_tokens = tonumber(own[2] or '') or limits.tenant_waiting_tokens,
    per_minute = tonumber(own[3] or '') or limits.tenant_tokens_per_minute,
    jobs = jobs + (tonumber(has[3]) or 0), tokens = tokens + (tonumber(has[4]) or 0),
    queued_jobs = jobs, queued_tokens = tokens,
  }
  if tenant.per_minute > 0 then
    local full = redis.pcall('ZSCORE', limits.rates_key, name)
    tenant.full_ms = type(full) == 'string' and tonumber(full) or 0
  end
  limits.tenants[name] = tenant
  return tenant
end

local function retry_text(ms)
  return string.format('%.0f', math.min(math.max(ms, LEAST_RETRY_MS), MOST_RETRY_MS))
end

-- Slots that were just filled took jobs quickly and take none until some end: so the
-- slower rate counts of what left the queue and what ended. `each` is what one job
-- makes room for.
local function retry_after(limits, excess, drained_per_ms, each)
  local per_ms, ends = drained_per_ms, limits.ends_per_ms
  if ends and ends * each < (per_ms or math.huge) then
    per_ms = ends * each
  end
  return retry_text(per_ms and per_ms > 0 and excess / per_ms or BLIND_RETRY_MS)
end

local function wrong_size(limits, job)
  if job.bytes > limits.max_payload_bytes then
    return string.format(
      'payload: has %d bytes; expected at most %d (max_payload_bytes)',
      job.bytes, limits.max_payload_bytes
    )
  end
  return nil
end

-- How much of its allowance a job uses, as the ms in which so much comes back.
local function allowance_ms(tenant, job)
  return (job.tokens + job.max_tokens) * MINUTE_MS / tenant.per_minute
end

-- What is larger than the whole allowance goes when the allowance is full.
local function over_allowance(limits, job, tenant)
  local used_ms = tenant.per_minute > 0 and tenant.full_ms - limits.now or 0
  if used_ms <= 0 then
    return nil
  end
  local short_ms = used_ms - math.max(MINUTE_MS - allowance_ms(tenant, job), 0)
  if short_ms <= 0 then
    return nil
  end
  local left = math.max(tenant.per_minute * (1 - used_ms / MINUTE_MS), 0)
  return retry_text(short_ms),
    string.format('tenant_tokens_per_minute: the job asks for %d tokens and %.0f of %d '
      .. 'are left', job.tokens + job.max_tokens, left, tenant.per_minute)
end

-- Tokens or bytes that one job which waits has on average.
local function mean_of(sum, jobs)
  return jobs > 0 and sum / jobs or 1
end

local function over_tenant(limits, job)
  local tenant = tenant_of(limits, job.tenant)
  local turns = math.max(limits.waiting_tenants, 1) -- others drain at the same time
  local most_jobs = most_of(tenant.max_jobs, job)
  local most_tokens = most_of(tenant.max_tokens, job)
  if tenant.jobs + 1 > most_jobs then
    local excess = (tenant.jobs + 1 - most_jobs) * turns
    return retry_after(limits, excess, limits.jobs_per_ms, 1),
      string.format('tenant_waiting_jobs: %d jobs of this tenant wait and %s',
        tenant.jobs, limit_text(tenant.max_jobs, job))
  elseif tenant.jobs > 0 and tenant.tokens + job.tokens > most_tokens then
    local excess = (tenant.tokens + job.tokens - most_tokens) * turns
    local each = mean_of(tenant.tokens, tenant.jobs)
    return retry_after(limits, excess, limits.tokens_per_ms, each),
      string.format('tenant_waiting_tokens: %d tokens of this tenant wait, the job has '
        .. '%d and %s', tenant.tokens, job.tokens, limit_text(tenant.max_tokens, job))
  end
  return over_allowance(limits, job, tenant)
end

-- Returns ms until a retry has a chance, and detail, when a limit is reached.
local function over_limit(limits, job)
  local jobs, tokens, bytes = limits.jobs, limits.tokens, limits.bytes
  local most_jobs = most_of(limits.max_waiting_jobs, job)
  local most_tokens = most_of(limits.max_waiting_tokens, job)
  local most_bytes = most_of(limits.max_waiting_bytes, job)
  if jobs + 1 > most_jobs then
    return retry_after(limits, jobs + 1 - most_jobs, limits.jobs_per_ms, 1),
      string.format('max_waiting_jobs: %d jobs wait and %s', jobs,
        limit_text(limits.max_waiting_jobs, job))
  elseif jobs > 0 and tokens + job.tokens > most_tokens then
    local excess, each = tokens + job.tokens - most_tokens, mean_of(tokens, jobs)
    return retry_after(limits, excess, limits.tokens_per_ms, each),
      string.format('max_waiting_tokens: %d tokens wait, the job has %d and %s',
        tokens, job.tokens, limit_text(limits.max_waiting_tokens, job))
  elseif jobs > 0 and bytes + job.bytes > most_bytes then
    local each = mean_of(bytes, jobs)
    local per_ms = limits.jobs_per_ms and limits.jobs_per_ms * each
    return retry_after(limits, bytes + job.bytes - most_bytes, per_ms, each),
      string.format('max_waiting_bytes: payloads of %d bytes wait, the job has %d and '
        .. '%s', bytes, job.bytes, limit_text(limits.max_waiting_bytes, job))
  end
  return over_tenant(limits, job)
end

-- Returns the ms that a job would take when that is more than its deadline gives it, by
-- what waits before it and the measured rate; nil when it can be met or nobody knows.
-- Bulk does not delay interactive work, and no tenant waits for more than its turn:
-- while it gets so much as it has waiting, every other gets the same at most.
local function lateness(limits, job)
  if job.deadline == '' then
    return nil
  end
  local tenant = tenant_of(limits, job.tenant)
  local others = limits.waiting_tenants - (tenant.queued_jobs > 0 and 1 or 0)
  local own = tenant.queued_tokens + job.tokens
  local ahead = job.class == 'interactive' and limits.interactive
    or limits.queued_tokens
  ahead = math.min(ahead, tenant.queued_tokens + others * own)
  local wait = 0
  if limits.tokens_per_ms and limits.tokens_per_ms > 0 then
    wait = ahead / limits.tokens_per_ms
  elseif ahead > 0 then
    wait = limits.stalled_ms -- nothing was drained for so long: no sooner from now
  end
  local needed = math.max(wait, job.delay_ms) + limits.service_ms
  if needed <= job.deadline_ms then
    return nil
  end
  return string.format('%.0f', math.min(needed, 1e12))
end

-- Books a recorded job, so that the next of this call sees it.
local function take_room(limits, job)
  local tenant = tenant_of(limits, job.tenant)
  limits.jobs, limits.tokens = limits.jobs + 1, limits.tokens + job.tokens
  limits.bytes = limits.bytes + job.bytes
  tenant.jobs, tenant.tokens = tenant.jobs + 1, tenant.tokens + job.tokens
  if not job.due then
    limits.queued_tokens = limits.queued_tokens + job.tokens
    if job.class == 'interactive' then
      limits.interactive = limits.interactive + job.tokens
    end
    if tenant.queued_jobs == 0 then
      limits.waiting_tenants = limits.waiting_tenants + 1
    end
    tenant.queued_jobs = tenant.queued_jobs + 1
    tenant.queued_tokens = tenant.queued_tokens + job.tokens
  end
  if tenant.per_minute > 0 then
    tenant.full_ms = math.max(tenant.full_ms, limits.now) + allowance_ms(tenant, job)
    tenant.spent = true
  end
end

-- Writes allowances that were used. A tenant whose allowance is full again is not kept,
-- and the whole goes when that is true of all.
local function save_rates(limits)
  local key, spent = limits.rates_key, false
  for name, tenant in pairs(limits.tenants) do
    if tenant.spent then
      spent = true
      redis.pcall('ZADD', key, string.format('%.3f', tenant.full_ms), name)
    end
  end
  if spent then
    redis.pcall('ZREMRANGEBYSCORE', key, '-inf', limits.now)
    local last = redis.pcall('ZRANGE', key, -1, -1, 'WITHSCORES')
    if last[2] then
      redis.pcall('PEXPIREAT', key, string.format('%.0f', math.ceil(last[2])))
    end
  end
end
