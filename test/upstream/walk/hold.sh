# Holds a connection open to each target, with a request each second, and opens new ones
# besides. A target is NAME=HOST/PORT, of an HTTP server. It prints
#   held NAME N       the connection has answered N requests
#   broken NAME N     the connection ended, or was silent for 60 seconds, after N requests
#   new NAME N        N new connections have been answered
#   failed NAME N     one more was not, within 5 seconds

get() { # HOST FD, sends a request and reads its answer
	printf 'GET /hostname HTTP/1.1\r\nHost: walk\r\n\r\n' >&$1 || return
	local line length=
	while IFS= read -r -t 60 line <&$1; do
		case ${line%$'\r'} in
		[Cc]ontent-[Ll]ength:*) length=${line%$'\r'} length=${length##* } ;;
		'')
			IFS= read -r -t 60 -N "$length" line <&$1
			return
			;;
		esac
	done
	return 1
}

hold() { # NAME HOST PORT
	local n=0
	until exec {connection}<>/dev/tcp/$2/$3; do sleep 1; done 2>/dev/null
	while get $connection; do
		n=$((n + 1))
		[ $((n % 3)) = 0 ] && echo "held $1 $n"
		sleep 1
	done
	echo "broken $1 $n"
}

renew() { # NAME HOST PORT
	local n=0
	while sleep 1; do
		if timeout 5 bash -c 'exec 3<>/dev/tcp/$1/$2 && printf "GET /hostname HTTP/1.0\r\n\r\n" >&3 && grep -q "200 OK" <&3' - "$2" "$3" 2>/dev/null; then
			n=$((n + 1))
			[ $((n % 10)) = 0 ] && echo "new $1 $n"
		else
			echo "failed $1 $n"
		fi
	done
}

trap '' PIPE
trap 'kill $(jobs -p); exit' TERM
for target in "$@"; do
	address=${target#*=} name=${target%%=*}
	hold "$name" "${address%/*}" "${address##*/}" &
	renew "$name" "${address%/*}" "${address##*/}" &
done
wait
