-- What the scripts of bulk runs share. A run's keys expire `ttl` ms after they were last
-- touched; ttl is always ARGV[1].
local TTL = tonumber(ARGV[1] or '')
if not TTL or TTL < 1000 then
  return redis.error_reply('ERR tokenmill bulk: expected ms to live, at least 1000')
end

-- Renews what is there of these keys.
local function touch(...)
  for _, key in ipairs({ ... }) do
    redis.call('PEXPIRE', key, TTL)
  end
end

-- Decodes a JSON array of `count` objects; nil when it is something else.
local function entries_of(text, count)
  local good, list = pcall(cjson.decode, text or '')
  if not good or type(list) ~= 'table' or #list ~= count then
    return nil
  end
  return list
end

-- Whether the item under this key is this generation of it and has not settled.
local function is_going(key, generation)
  local item = redis.call('HMGET', key, 'generation', 'state')
  return item[1] == tostring(generation) and item[2] ~= 'settled'
end

-- Adds members to a set, or takes them away, a bounded number in one command.
local function each_part(command, key, members)
  for first = 1, #members, 1000 do
    redis.call(command, key, unpack(members, first, math.min(first + 999, #members)))
  end
end
