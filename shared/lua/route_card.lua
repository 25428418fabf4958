-- route_card: a worker says what its version of a model can do. Producers see it at once
-- only where the model has no route, or this version has a share of it.
--
-- KEYS 1 tm:versions:<model>       hash  field `route`: JSON Route; read
--      2 tm:version-cards:<model>  hash  version -> JSON ModelCard; only with a route
--      3 tm:models                 hash  model -> JSON ModelCard
-- ARGV 1 model, 2 version, 3 JSON ModelCard
-- Returns 1 where producers see it now, else 0.
--include cards
local route = read_route(KEYS[1])
if not route or #sharing(route) == 0 then
  redis.call('HSET', KEYS[3], ARGV[1], ARGV[3])
  return 1
end
redis.call('HSET', KEYS[2], ARGV[2], ARGV[3])
if not has_share(route, ARGV[2]) then
  return 0
end
refresh_card(route, KEYS[2], KEYS[3], ARGV[1])
return 1
