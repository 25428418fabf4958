#!/bin/sh
# Prints a password for each role of the composition and the secret that webhooks are
# signed with, for a file that only you can read:
#   sh deploy/passwords.sh >.env
set -eu
for role in METRICS PRODUCER GATEWAY SCHEDULER WORKER JANITOR; do
  echo "REDIS_${role}_PASSWORD=$(od -An -N24 -tx1 /dev/urandom | tr -d ' \n')"
done
echo "COMPOSE_PROFILES=cpu"
echo "GRAFANA_PASSWORD=$(od -An -N12 -tx1 /dev/urandom | tr -d ' \n')"
echo "WEBHOOKS_SECRET=whsec_$(head -c 32 /dev/urandom | base64 | tr -d '\n')"
