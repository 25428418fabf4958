-- The card of a model that has a route: what all versions with a share can do. Cards are
-- changed as text, so that fields which only a newer worker knows stay as they are.
local function decoded(text)
  local good, value = pcall(cjson.decode, text or '')
  return good and type(value) == 'table' and value or nil
end

local function read_route(key)
  local text = redis.pcall('HGET', key, 'route')
  return type(text) == 'string' and decoded(text) or nil
end

local function has_share(route, version)
  local shares = route and type(route.shares) == 'table' and route.shares or {}
  return (tonumber(shares[version]) or 0) > 0
end

-- Versions with a share, the largest first.
local function sharing(route)
  local names = {}
  for name in pairs(type(route.shares) == 'table' and route.shares or {}) do
    if has_share(route, name) then
      names[#names + 1] = name
    end
  end
  table.sort(names, function(a, b)
    local left, right = tonumber(route.shares[a]), tonumber(route.shares[b])
    return left > right or (left == right and a < b)
  end)
  return names
end

local function with_field(text, name, value)
  return (string.gsub(text, '("' .. name .. '":)[%w%.+-]+', '%1' .. value, 1))
end

-- Writes the model's card; nothing where no version with a share has one yet.
local function refresh_card(route, cards_key, models_key, model)
  local text, card = nil, nil
  for _, name in ipairs(sharing(route)) do
    local raw = redis.pcall('HGET', cards_key, name)
    local one = type(raw) == 'string' and decoded(raw)
    if one and not card then
      text, card = raw, one
    elseif one then
      card.max_context = math.min(card.max_context, one.max_context)
      card.vocab_size = math.min(card.vocab_size, one.vocab_size)
      card.has_chat_template = card.has_chat_template and one.has_chat_template
    end
  end
  if not card then
    return
  end
  text = with_field(text, 'max_context', string.format('%.0f', card.max_context))
  text = with_field(text, 'vocab_size', string.format('%.0f', card.vocab_size))
  text = with_field(text, 'has_chat_template', tostring(card.has_chat_template))
  -- What the scheduler has learned holds for the tokenizer, whoever announces it.
  local before = redis.pcall('HGET', models_key, model)
  local known = type(before) == 'string' and decoded(before)
  if known and known.tokenizer == card.tokenizer and tonumber(known.bytes_per_token) then
    text = with_field(text, 'bytes_per_token', tostring(known.bytes_per_token))
  end
  redis.call('HSET', models_key, model, text)
end
