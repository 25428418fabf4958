-- What ended jobs have used, by day and tenant, in the hash `usage`: field
-- `<days since 1970>:<tenant>`, value six numbers with blanks between: jobs that
-- succeeded, failed, were cancelled, expired, then prompt and output tokens. A job
-- counts once, on the day of its end by the clock of Redis, however often it ran.
-- Summed over the whole call and written once by save_usage.
local USAGE_DAY_MS, USAGE_PAGE, USAGE_NUMBERS = 86400000, 128, 6
local USAGE_STATES = { succeeded = 1, failed = 2, cancelled = 3, expired = 4 }
local used = {}

-- What a stranger made no count counts nothing.
local function usage_count(value)
  local count = tonumber(value) or 0
  return count >= 0 and count < 2 ^ 53 and math.floor(count) or 0
end

-- Output tokens in a log of so many choices: the last delta of each says how far it came.
-- Its text is not parsed: within a JSON string no quotation mark stands by itself.
local function tokens_in_log(log, choices)
  local reached, left, total, last = {}, choices, 0, '+'
  local page = redis.pcall('XREVRANGE', log, last, '-', 'COUNT', choices + 2)
  while left > 0 and page[1] do
    for _, entry in ipairs(page) do
      last = '(' .. entry[1]
      local delta = entry[2][1] == 'd' and entry[2][2] or ''
      local ids = string.match(delta, '"token_ids":%[([%d,]+)%]')
      local choice = string.match(delta, '"choice":(%d+)') or '0'
      if ids and not reached[choice] then
        local _, commas = string.gsub(ids, ',', ',')
        reached[choice] = true
        left = left - 1
        total = total + usage_count(string.match(delta, '"offset":(%d+)')) + commas + 1
      end
    end
    page = left > 0 and redis.pcall('XREVRANGE', log, last, '-', 'COUNT', USAGE_PAGE)
      or {}
  end
  return total
end

-- Prompt and output tokens of a job that nobody said the usage of: what its record and
-- its log know. A prompt counts from the first start on.
local function known_usage(at)
  local job = redis.pcall('HMGET', KEYS[at], 'started_ms', 'tokens', 'cost_running')
  if not job[1] then
    return 0, 0
  end
  local choices = math.min(math.max(usage_count(job[3]), 1), 64)
  return usage_count(job[2]), tokens_in_log(KEYS[at + 4], choices)
end

-- Before the end marker is written. Only the owner of a job is believed.
local function count_usage(at, job, ending)
  local prompt, output
  if ending.owner or ending.told_by then
    prompt, output = string.match(
      ending.finale, '"usage":{"prompt_tokens":(%d+),"completion_tokens":(%d+)}'
    )
  end
  if not prompt or prompt == '0' then -- no prompt is empty: nobody knew
    prompt, output = known_usage(at)
  end
  local mine = used[job.tenant] or { 0, 0, 0, 0, 0, 0 }
  local state = USAGE_STATES[ending.state]
  mine[state] = mine[state] + 1
  mine[5], mine[6] = mine[5] + usage_count(prompt), mine[6] + usage_count(output)
  used[job.tenant] = mine
end

-- A stranger's key of another type takes no counts, and stops no end of a job.
local function save_usage(key, now)
  local day = string.format('%d:', math.floor(now / USAGE_DAY_MS))
  for tenant, mine in pairs(used) do
    local before = redis.pcall('HGET', key, day .. tenant)
    local number = string.gmatch(type(before) == 'string' and before or '', '%S+')
    for i = 1, USAGE_NUMBERS do
      mine[i] = string.format('%.0f', mine[i] + usage_count(number()))
    end
    redis.pcall('HSET', key, day .. tenant, table.concat(mine, ' '))
  end
end
