-- What an active job holds of its group's budget, and what of that is bulk: an
-- interactive job may take what bulk holds, since the engine preempts bulk for it.
-- Sums what jobs give back, then writes it once; a group that is gone must not come
-- back as a key without expiry.
local CREDIT_FIELDS = {
  'class', 'alone', 'cost_blocks', 'cost_running', 'cost_tokens', 'credit_tokens_back',
}
local CREDIT_OF = {
  blocks = 'credit_blocks', running = 'credit_running', tokens = 'credit_tokens',
}
local BULK_OF = {
  blocks = 'bulk_blocks', running = 'bulk_running', tokens = 'bulk_tokens',
}

local function new_credit()
  return {
    all = { blocks = 0, running = 0, tokens = 0 },
    bulk = { blocks = 0, running = 0, tokens = 0 },
    alone = false,
  }
end

-- What a job holds now; prefill tokens that it gave back are not in it.
local function held_of(job)
  return {
    blocks = tonumber(job.cost_blocks) or 0,
    running = tonumber(job.cost_running) or 1,
    tokens = job.credit_tokens_back ~= '1' and tonumber(job.cost_tokens) or 0,
  }
end

local function add_credit(credit, class, held)
  for name, amount in pairs(held) do
    credit.all[name] = credit.all[name] + amount
    if class == 'bulk' then
      credit.bulk[name] = credit.bulk[name] + amount
    end
  end
end

local function give_back(credit, job)
  add_credit(credit, job.class, held_of(job))
  credit.alone = credit.alone or job.alone == '1'
end

-- `sign` is 1 for what comes back and -1 for what is taken. A stranger's key may be of
-- any type, hence pcall. A group of a version that keeps no books of bulk gets none, and
-- what would go below nothing was taken before they were opened.
local function save_credit(group_key, credit, sign)
  if redis.call('EXISTS', group_key) == 0 then
    return
  end
  local function add(field, by)
    local total = by ~= 0
      and redis.pcall('HINCRBY', group_key, field, string.format('%.0f', by))
    return type(total) == 'number' and total or 0
  end
  for name, by in pairs(credit.all) do
    add(CREDIT_OF[name], sign * by)
  end
  local keeps = redis.pcall('HEXISTS', group_key, BULK_OF.blocks) == 1
  for name, by in pairs(keeps and credit.bulk or {}) do
    if add(BULK_OF[name], -sign * by) < 0 then
      redis.pcall('HSET', group_key, BULK_OF[name], 0)
    end
  end
  if credit.alone then
    redis.pcall('HSET', group_key, 'alone', '')
  end
end
