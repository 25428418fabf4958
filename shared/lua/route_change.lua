-- route_change: changes which versions of a model there are, or who gets its jobs. The
-- caller has read both and made the change from that; another change meanwhile, told by
-- the route's serial, stops it. What must never be is checked again here.
--
-- KEYS 1 tm:versions:<model>       hash  `route` -> JSON Route, `spec:<version>` -> JSON
--                                        VersionSpec
--      2 tm:version-cards:<model>  hash  version -> JSON ModelCard
--      3 tm:models                 hash  model -> JSON ModelCard: follows the shares
--      4 tm:versioned              set   models with versions
-- ARGV 1 model, 2 serial that was read (0 without a route), 3 JSON Route to write, its
--      serial one higher (of restore: at least), 4 what is changed: fix (who serves a
--      model without shares), add (a version that is not there yet), put (one that may be
--      there), set (one that is there), remove, route (shares, shadow or retiring),
--      restore (a route that was lost, as somebody has seen it) or forget (the whole
--      model), 5 the version ('' for fix, route, restore and forget), 6 its JSON
--      VersionSpec ('' for those and remove)
-- Returns two: status and detail.
--      done
--      changed  the serial is another; detail is the serial: read again
--      refused  detail says why; nothing was changed
--include cards
local model, action, version, spec = ARGV[1], ARGV[4], ARGV[5], ARGV[6]
local WRITES = { add = true, put = true, set = true }
-- Changes whose shares may be of versions that nobody has described, or not yet again.
local UNDESCRIBED = { fix = true, restore = true }

local raw = redis.pcall('HGET', KEYS[1], 'route')
if type(raw) == 'table' then
  return { 'refused', 'keys: tm:versions:<model> holds another type' }
end
local old, new = raw and decoded(raw) or {}, decoded(ARGV[3])
local serial = tonumber(old.serial) or 0
if serial ~= tonumber(ARGV[2]) then
  return { 'changed', string.format('%.0f', serial) }
end

local function state_of(name)
  local found = decoded(redis.call('HGET', KEYS[1], 'spec:' .. name) or '')
  return found and (found.state or 'added')
end

-- Who has a share where it had another before.
local function changed_shares()
  local before, found = sharing(old), {}
  local same = #before == #sharing(new)
  for _, name in ipairs(sharing(new)) do
    found[#found + 1] = name
    local was = has_share(old, name) and tonumber(old.shares[name]) or 0
    same = same and was == tonumber(new.shares[name])
  end
  return same and {} or found
end

local function named_before(name)
  local previous = type(old.previous) == 'table' and old.previous or {}
  return has_share(old, name) or (tonumber(previous[name]) or 0) > 0
end

local function wrong_shares()
  local total = 0
  for _, name in ipairs(sharing(new)) do
    total = total + tonumber(new.shares[name])
  end
  if total ~= 0 and math.abs(total - 100) > 1e-6 then
    return string.format('shares: %g %% together; expected 100', total)
  end
  for _, name in ipairs(changed_shares()) do
    local state = state_of(name)
    if state and state ~= 'ready' then
      return string.format('shares: version %s is %s; expected ready', name, state)
    elseif not state and not UNDESCRIBED[action] and not named_before(name) then
      return 'shares: there is no version ' .. name
    end
  end
  return nil
end

-- A model is forgotten once it retires and nothing of it can have a job any more.
local function alive()
  for _, field in ipairs(redis.call('HKEYS', KEYS[1])) do
    local name = string.match(field, '^spec:(.*)$')
    local state = name and state_of(name)
    if state == 'loading' or state == 'ready' or state == 'draining' then
      return true
    end
  end
  return not old.retiring or #sharing(old) > 0
end

local function wrong()
  local ahead = new and (tonumber(new.serial) or 0) - serial or 0
  if ahead < 1 or (ahead > 1 and action ~= 'restore') then
    return 'route: expected a JSON object whose serial is one higher'
  elseif action == 'fix' and #sharing(old) > 0 then
    return 'fix: there are shares already'
  elseif action == 'add' and state_of(version) then
    return 'add: the name ' .. version .. ' is in use'
  elseif (action == 'set' or action == 'remove') and not state_of(version) then
    return action .. ': there is no version ' .. version
  elseif action == 'remove' and (has_share(old, version) or has_share(new, version)) then
    return 'remove: version ' .. version .. ' has a share'
  elseif WRITES[action] and not decoded(spec) then
    return 'spec: expected a JSON object'
  elseif action == 'add' and old.retiring and not decoded(spec).state then
    return 'add: the model retires; add it again once that has ended'
  elseif action == 'forget' and alive() then
    return 'forget: the model does not retire, or has versions that may run'
  end
  return wrong_shares()
end

local problem = wrong()
if problem then
  return { 'refused', problem }
end
if action == 'forget' then
  redis.call('DEL', KEYS[1], KEYS[2])
  redis.pcall('HDEL', KEYS[3], model)
  redis.pcall('SREM', KEYS[4], model)
  return { 'done', '' }
end
local fields = { 'route', ARGV[3] }
if WRITES[action] then
  fields[3], fields[4] = 'spec:' .. version, spec
end
redis.call('HSET', KEYS[1], unpack(fields))
redis.pcall('SADD', KEYS[4], model)
if action == 'remove' then
  redis.call('HDEL', KEYS[1], 'spec:' .. version)
  redis.pcall('HDEL', KEYS[2], version)
elseif action == 'fix' then
  -- Who serves has said so before there was a place for each version.
  local card = redis.pcall('HGET', KEYS[3], model)
  for _, name in ipairs(sharing(new)) do
    if type(card) == 'string' then
      redis.pcall('HSETNX', KEYS[2], name, card)
    end
  end
end
if #changed_shares() > 0 then
  refresh_card(new, KEYS[2], KEYS[3], model)
end
return { 'done', '' }
