#!/usr/bin/env bash
# Two hosts on one machine: network namespaces with a link between them, and torchrun on both.
#
#   tests/hosts.sh FOLDER RANKS PROGRAM [ARGUMENT ...]
#
# Each host runs RANKS ranks of the program; what they print is in FOLDER/host0.log and host1.log. A rank that leaves
# FOLDER/cut has the link taken down; cut.done says that it is. Ends when the program has, or has left FOLDER/ended, or after
# four minutes, and leaves nothing behind. Needs root and iproute2: exit status 77, with the reason, where there are no
# namespaces to be had.
set -u
folder=$1 ranks=$2
shift 2
python=${PYTHON:-python3}
one=axes-$$-1 two=axes-$$-2

clean() {
    for host in "$one" "$two"; do
        for pid in $(ip netns pids "$host" 2>/dev/null); do kill -9 "$pid" 2>/dev/null; done
        ip netns delete "$host" 2>/dev/null
    done
}
trap clean EXIT
trap 'exit 1' INT TERM

unavailable() {
    echo "no network namespaces: $(cat "$folder/why" 2>/dev/null)"
    exit 77
}
command -v ip >/dev/null || { echo "iproute2 isn't installed" >"$folder/why"; unavailable; }
{ ip netns add "$one" && ip netns add "$two"; } 2>"$folder/why" || unavailable
ip -n "$one" link add eth0 type veth peer name eth0 netns "$two" 2>"$folder/why" || unavailable
ip -n "$one" address add 10.77.0.1/24 dev eth0
ip -n "$two" address add 10.77.0.2/24 dev eth0
for host in "$one" "$two"; do
    ip -n "$host" link set lo up
    ip -n "$host" link set eth0 up
done

start() { # namespace, number of the host, program
    local host=$1 number=$2
    shift 2
    GLOO_SOCKET_IFNAME=eth0 OMP_NUM_THREADS=1 ip netns exec "$host" "$python" -m torch.distributed.run --nnodes 2 \
        --node-rank "$number" --nproc-per-node "$ranks" --master-addr 10.77.0.1 --master-port 29477 "$@" \
        >"$folder/host$number.log" 2>&1 &
}
start "$one" 0 "$@"
first=$!
start "$two" 1 "$@"
second=$!

for _ in $(seq 1200); do
    [ -e "$folder/cut" ] && ip -n "$one" link set eth0 down && mv "$folder/cut" "$folder/cut.done"
    [ -e "$folder/ended" ] && exit 0
    if ! kill -0 "$first" 2>/dev/null && ! kill -0 "$second" 2>/dev/null; then
        wait "$first" && wait "$second"
        exit
    fi
    sleep 0.2
done
echo "the program didn't end"
exit 1
