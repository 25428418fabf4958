-- What a client says of a new job, checked: by the same rules as keys.py, validate.py
-- and the scheduler. A wrong fact is refused by name and harms no other job.
local MOST_MS = 3155760000000 -- a hundred years; larger is a mistake
local MOST_SEED = '9223372036854775807'
-- Asked for many times a job.
local find, floor, null = string.find, math.floor, cjson.null
local KNOWN = {
  id = true, hash = true, class = true, tenant = true, priority = true, bucket = true,
  lane = true, tokens = true, max_tokens = true, seed = true, deadline_ms = true,
  delay_ms = true, not_before_ms = true, keep_ms = true, idempotency_key = true,
  refuse_late = true, webhook = true, version = true, adapter = true, v = true,
}

local function whole(value, least, most)
  return type(value) == 'number' and value >= least and value <= most
    and value == floor(value)
end

local function is_text(value, pattern, longest)
  return type(value) == 'string' and #value <= longest
    and find(value, pattern) ~= nil
end

-- Names of the shard: what ids begin with, or nil when no shard has this prefix.
local function shard_of(prefix)
  local model, partition = string.match(prefix, '^tm:{([%w_][%w._/-]*):(%d+)}:$')
  if not model or #model > 96 or #partition > 3
    or partition ~= string.format('%d', partition) then
    return { prefix = prefix }
  end
  return { prefix = prefix, head = model .. '.' .. partition .. '.' }
end

local function wrong_id(id, shard)
  local head = shard.head
  if not head or type(id) ~= 'string' or string.sub(id, 1, #head) ~= head
    or #id < #head + 16 or #id > #head + 40
    or not find(id, '^[a-z0-9]+$', #head + 1) then
    return 'id: expected <model>.<partition>.<16 to 40 of a-z and 0-9>, with model and '
      .. 'partition of the shard in the keys'
  end
  return nil
end

local function wrong_words(f)
  if not is_text(f.hash, '^%S+$', 64) then
    return 'hash: expected 1 to 64 characters without white space'
  elseif f.class ~= 'interactive' and f.class ~= 'bulk' then
    return 'class: expected interactive or bulk'
  elseif not is_text(f.tenant, '^[%w_][%w._@+-]*$', 64) then
    return 'tenant: expected 1 to 64 letters, digits and . _ @ + -, '
      .. 'beginning with a letter, a digit or _'
  elseif not is_text(f.bucket, '^[a-z0-9]+$', 10) then
    return 'bucket: expected 1 to 10 of a-z and 0-9'
  elseif f.idem ~= '' and not is_text(f.idem, '^[!-~]+$', 200) then
    return 'idempotency_key: expected 1 to 200 printable ASCII characters '
      .. 'without blanks'
  elseif not is_text(f.seed, '^%d+$', 19) or (#f.seed == 19 and f.seed > MOST_SEED) then
    return 'seed: expected text of digits, 0 to 2^63 - 1'
  elseif f.webhook ~= '' and not is_text(f.webhook, '^https?://[!-~]+$', 2048) then
    return 'webhook: expected an address that begins with http:// or https://, of at '
      .. 'most 2048 printable ASCII characters without blanks'
  elseif f.version ~= '' and not is_text(f.version, '^[%w_][%w._+-]*$', 32) then
    return 'version: expected 1 to 32 letters, digits and . _ + -, '
      .. 'beginning with a letter, a digit or _'
  elseif f.adapter ~= '' and not is_text(f.adapter, '^[%w_][%w._-]*$', 64) then
    return 'adapter: expected 1 to 64 letters, digits and . _ -, '
      .. 'beginning with a letter, a digit or _'
  elseif type(f.refuse_late) ~= 'boolean' then
    return 'refuse_late: expected true or false'
  end
  return nil
end

local function wrong_numbers(f)
  if not whole(f.priority, -100, 100) then
    return 'priority: expected a whole number from -100 to 100'
  elseif not whole(f.lane, 0, 255) then
    return 'lane: expected a whole number from 0 to 255'
  elseif not whole(f.tokens, 1, 1e9) then
    return 'tokens: expected a whole number from 1'
  elseif not whole(f.max_tokens, 1, 1e9) then
    return 'max_tokens: expected a whole number from 1'
  elseif not whole(f.keep_ms, 1, MOST_MS) then
    return 'keep_ms: expected ms from 1'
  elseif not whole(f.v, 1, 1e6) then
    return 'v: expected a whole number from 1'
  end
  return nil
end

-- Times: what is due later, and a deadline that comes before it.
local function wrong_times(f, now)
  if not whole(f.delay_ms, 0, MOST_MS) then
    return 'delay_ms: expected ms from 0'
  elseif f.not_before_ms ~= nil then
    if not whole(f.not_before_ms, 0, now + MOST_MS) then
      return 'not_before_ms: expected ms of the time of Redis'
    elseif f.delay_ms ~= 0 then
      return 'not_before_ms: given beside delay_ms; expected one of them'
    end
    f.delay_ms = math.max(f.not_before_ms - now, 0)
  end
  if f.delay_ms > 0 then
    f.due = now + f.delay_ms
  end
  f.deadline = ''
  if f.deadline_ms ~= nil then
    if not whole(f.deadline_ms, 0, MOST_MS) then
      return 'deadline_ms: expected ms from now'
    elseif f.due and f.deadline_ms <= f.delay_ms then
      return 'deadline_ms: comes before the job is due; expected more than '
        .. string.format('%.0f ms', f.delay_ms)
    end
    f.deadline = string.format('%.0f', now + f.deadline_ms)
  end
  return nil
end

-- Returns the job with every default filled in, and what is wrong with it or nil.
local function facts_of(text, payload, shard, now)
  local read, f = pcall(cjson.decode, text)
  if not read or type(f) ~= 'table' then
    return nil, 'facts: expected a JSON object'
  end
  for name, value in pairs(f) do
    if not KNOWN[name] then
      return nil, 'facts: ' .. string.sub(tostring(name), 1, 40) .. ' is not known'
    elseif value == null then
      f[name] = nil
    end
  end
  local wrong = wrong_id(f.id, shard)
  if wrong then
    return nil, wrong
  end
  f.class, f.tenant = f.class or 'interactive', f.tenant or 'default'
  f.priority, f.delay_ms = f.priority or 0, f.delay_ms or 0
  f.keep_ms, f.v = f.keep_ms or 3600000, f.v or 1
  f.idem, f.webhook = f.idempotency_key or '', f.webhook or ''
  f.version, f.adapter = f.version or '', f.adapter or ''
  if f.refuse_late == nil then
    f.refuse_late = false
  end
  f.bytes = #payload
  return f, wrong_words(f) or wrong_numbers(f) or wrong_times(f, now)
end

-- `hooks` is the name of the last key where one follows those of the jobs.
local function wrong_keys(f, shard, k, hooks)
  local prefix, id = shard.prefix, f.id
  local lane = f.class .. ':' .. f.bucket .. ':' .. f.lane
  if KEYS[k + 1] ~= prefix .. 'job:' .. id or KEYS[k + 2] ~= prefix .. 'in:' .. id then
    return 'keys: expected job:<id> and in:<id> of this shard'
  elseif KEYS[k + 3] ~= prefix .. 'q:' .. lane then
    return 'keys: expected q:<class>:<bucket>:<lane> as in the facts'
  elseif KEYS[k + 4] ~= (f.idem == '' and KEYS[k + 1]
      or prefix .. 'idem:' .. f.tenant .. ':' .. f.idem) then
    return 'keys: expected idem:<tenant>:<key>, or job:<id> again without a key'
  elseif f.webhook ~= '' and hooks ~= prefix .. 'webhooks' then
    return 'keys: expected webhooks of this shard after those of the jobs'
  end
  return nil
end
