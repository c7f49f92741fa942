# Holds a connection open to each target, with a request every two seconds, and opens new
# ones besides. It starts few processes: on an emulated node, those of a client for each
# second took most of the processor. A target is NAME=HOST/PORT, of an HTTP server. It prints
#   held NAME N       the connection has answered N requests
#   broken NAME N     the connection ended, or was silent for 60 seconds, after N requests
#   new NAME N        N new connections have been answered
#   failed NAME N     one more was not, within 5 seconds

pause() { # SECONDS, without a process
	IFS= read -r -t "$1" <&$never
	return 0
}

get() { # FD, sends a request and reads its answer
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
	until exec {connection}<>/dev/tcp/$2/$3; do pause 1; done 2>/dev/null
	while get $connection; do
		n=$((n + 1))
		[ $((n % 3)) = 0 ] && echo "held $1 $n"
		pause 2
	done
	echo "at $SECONDS s: ended, or silent for 60 s"
	echo "broken $1 $n"
}

fresh() { # N HOST PORT, prints N when a new connection is answered
	local connection line
	exec {connection}<>/dev/tcp/$2/$3 || return
	printf 'GET /hostname HTTP/1.0\r\n\r\n' >&$connection
	read -r line <&$connection && [[ $line == *"200 OK"* ]] && echo "$1"
}

renew() { # NAME HOST PORT
	local n=0 i=0 answers answer
	exec {answers}<> <(:)
	while pause 5; do
		i=$((i + 1)) answer=
		fresh $i "$2" "$3" >&$answers 2>/dev/null &
		until [ "$answer" = $i ]; do # an earlier one may be late
			read -r -t 5 answer <&$answers || break
		done
		if [ "$answer" = $i ]; then
			n=$((n + 1))
			[ $((n % 5)) = 0 ] && echo "new $1 $n"
		else
			echo "failed $1 $n"
			kill $! 2>/dev/null
		fi
	done
}

exec {never}<> <(:)
trap '' PIPE
trap 'kill $(jobs -p); exit' TERM
for target in "$@"; do
	address=${target#*=} name=${target%%=*}
	hold "$name" "${address%/*}" "${address##*/}" &
	renew "$name" "${address%/*}" "${address##*/}" &
done
wait
