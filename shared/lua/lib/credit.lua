-- What an active job holds of its group's budget. Sums what jobs give back, then
-- writes it once; a group that is gone must not come back as a key without expiry.
local function new_credit()
  return { credit_blocks = 0, credit_running = 0, credit_tokens = 0 }
end

local function give_back(credit, job)
  credit.credit_running = credit.credit_running + (tonumber(job.cost_running) or 1)
  credit.credit_blocks = credit.credit_blocks + (tonumber(job.cost_blocks) or 0)
  if job.credit_tokens_back ~= '1' then
    credit.credit_tokens = credit.credit_tokens + (tonumber(job.cost_tokens) or 0)
  end
end

local function save_credit(group_key, credit)
  if redis.call('EXISTS', group_key) == 1 then
    for field, by in pairs(credit) do
      if by ~= 0 then
        redis.pcall('HINCRBY', group_key, field, by) -- a stranger's key may be any type
      end
    end
  end
end
