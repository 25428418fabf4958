#!/bin/sh
# Makes the server's list of users from users.acl and the passwords of the environment
# (REDIS_<ROLE>_PASSWORD), then becomes the server. Arguments are settings of Redis that
# go over redis.conf.
set -eu
here=$(dirname "$0")
umask 077
users=$(mktemp)

major=$(redis-server --version | sed -n 's/.* v=\([0-9]*\)\..*/\1/p')
[ -n "$major" ] || { echo "redis-server does not say its version" >&2; exit 1; }
# Before 7.0 a key is allowed or not, for reading and writing alike.
if [ "$major" -lt 7 ]; then read_only='s/%R~/~/g'; else read_only=''; fi

awk '
  /^[[:space:]]*(#|$)/ { next }
  /^user / { if (rule != "") print rule; rule = $0; next }
  { sub(/^[[:space:]]+/, " "); rule = rule $0 }
  END { print rule }
' "$here/users.acl" | sed "$read_only" | while read -r _ role rules; do
  if [ "$role" = default ]; then
    echo "user default $rules"
    continue
  fi
  variable="REDIS_$(echo "$role" | tr '[:lower:]' '[:upper:]')_PASSWORD"
  password=$(printenv "$variable") || password=''
  if [ "${#password}" -lt 16 ]; then
    echo "$variable must have 16 characters at least; deploy/passwords.sh makes them" >&2
    exit 1
  fi
  hash=$(printf '%s' "$password" | sha256sum | cut -d ' ' -f 1)
  echo "user $role #$hash $rules"
done >"$users"

exec redis-server "$here/redis.conf" --aclfile "$users" "$@"
