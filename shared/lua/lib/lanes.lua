-- Sets a lane's score to the time of its oldest entry, or drops an empty lane. The
-- stream's name, `<prefix>q:<class>:<bucket>:<lane>`, names the member as well.
local function refresh_lane(lanes_key, stream_key)
  local member = string.match(stream_key, ':q:([^:]+:[^:]+:[^:]+)$')
  if not member then
    return
  end
  local oldest = redis.pcall('XRANGE', stream_key, '-', '+', 'COUNT', 1)
  if oldest.err or not oldest[1] then
    redis.call('ZREM', lanes_key, member)
  else
    redis.call('ZADD', lanes_key, string.match(oldest[1][1], '^%d+'), member)
  end
end
