/*
 * traffic is the client and the server of `make bench-instructions`: single
 * processes with blocking calls, so that the number of instructions that an exchange
 * takes does not depend on a scheduler or on timers of theirs.
 *
 *	traffic serve tcp|udp ADDRESS PORT
 *	traffic tcp-connection|tcp-round-trip|udp-exchange|udp-round-trip \
 *		ADDRESS PORT FIRST-SOURCE-PORT BATCHES COUNT
 *
 * A client prints a line for each batch: how far the processor's time stamp counter
 * has come in it. In a guest under `-icount shift=0` the counter counts instructions;
 * a client fails in any other.
 */
#include <arpa/inet.h>
#include <err.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

static const char line[] = "0123456789abcdef0123456789abcde\n";

/* How many exchanges come before the first batch: neighbours are resolved, and an open
 * connection of TCP costs the same from about its thousandth round trip on. */
enum { warm_up_new = 60, warm_up_open = 1500 };

/* How long an exchange may take: what is in the way drops it. */
enum { answer_limit = 4, whole_limit = 240 };

static struct sockaddr_storage peer;
static socklen_t peer_size;
static uint16_t source_port;

static uint64_t counter(void)
{
	uint32_t low, high;

	__asm__ volatile("lfence; rdtsc" : "=a"(low), "=d"(high));
	return (uint64_t)high << 32 | low;
}

/* Returns how far the counter comes in two million instructions. */
static uint64_t two_million(void)
{
	uint64_t begin = counter();
	long n = 1000000;

	__asm__ volatile("1: dec %0; jnz 1b" : "+r"(n) : : "cc");
	return counter() - begin;
}

/* Waits until nothing else runs for two million instructions, as after a namespace or
 * a program of the lab has begun or ended. */
static void await_calm(void)
{
	uint64_t took = 0;

	for (int i = 0; i < 100; i++) {
		took = two_million();
		if (took >= 2000000 && took < 2020000)
			return;
		usleep(20000);
	}
	errx(1, "the clock does not count instructions, or the machine is not at rest: %llu for 2,000,000", (unsigned long long)took);
}

static void parse(const char *address, const char *port)
{
	struct sockaddr_in *v4 = (struct sockaddr_in *)&peer;
	struct sockaddr_in6 *v6 = (struct sockaddr_in6 *)&peer;

	if (inet_pton(AF_INET, address, &v4->sin_addr) == 1) {
		v4->sin_family = AF_INET;
		v4->sin_port = htons(atoi(port));
		peer_size = sizeof *v4;
	} else if (inet_pton(AF_INET6, address, &v6->sin6_addr) == 1) {
		v6->sin6_family = AF_INET6;
		v6->sin6_port = htons(atoi(port));
		peer_size = sizeof *v6;
	} else {
		errx(2, "%s is not an address", address);
	}
}

static int new_socket(int type)
{
	int s = socket(peer.ss_family, type, 0), on = 1;

	if (s < 0 || setsockopt(s, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on))
		err(1, "socket");
	return s;
}

/* connected gives each socket the next source port: the kernel's search for a free one
 * takes longer the more are used. */
static int connected(int type)
{
	struct sockaddr_storage own = { .ss_family = peer.ss_family };
	int s = new_socket(type), on = 1;

	/* The port is at the same place in both families' addresses. */
	((struct sockaddr_in *)&own)->sin_port = htons(source_port++);
	if (bind(s, (struct sockaddr *)&own, peer_size))
		err(1, "bind");
	if (connect(s, (struct sockaddr *)&peer, peer_size))
		err(1, "connect");
	if (type == SOCK_STREAM && setsockopt(s, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on))
		err(1, "TCP_NODELAY");
	return s;
}

static void exchange(int s)
{
	char buffer[sizeof line];

	if (write(s, line, sizeof line - 1) != sizeof line - 1)
		err(1, "write");
	if (read(s, buffer, sizeof buffer) != sizeof line - 1)
		err(1, "read");
}

static void tcp_connection(int unused)
{
	char end;
	int s = connected(SOCK_STREAM);

	(void)unused;
	exchange(s);
	/* The server closes as well before the next connection begins. */
	if (shutdown(s, SHUT_WR) || read(s, &end, 1) != 0)
		err(1, "shutdown");
	close(s);
}

static void udp_exchange(int unused)
{
	int s = connected(SOCK_DGRAM);

	(void)unused;
	exchange(s);
	close(s);
}

static const struct workload {
	const char *name;
	int type; /* of the socket that stays open; 0 if each exchange has its own */
	void (*once)(int);
} workloads[] = {
	{ "tcp-connection", 0, tcp_connection },
	{ "tcp-round-trip", SOCK_STREAM, exchange },
	{ "udp-exchange", 0, udp_exchange },
	{ "udp-round-trip", SOCK_DGRAM, exchange },
};

static void measure(const struct workload *w, int batches, int count)
{
	int s = -1, warm_up = w->type ? warm_up_open : warm_up_new;

	await_calm();
	alarm(answer_limit);
	if (w->type)
		s = connected(w->type);
	w->once(s);
	alarm(whole_limit);
	for (int i = 1; i < warm_up; i++)
		w->once(s);
	for (int b = 0; b < batches; b++) {
		uint64_t begin = counter();

		for (int i = 0; i < count; i++)
			w->once(s);
		printf("%llu\n", (unsigned long long)(counter() - begin));
	}
}

static void serve_udp(int s)
{
	char buffer[512];

	for (;;) {
		struct sockaddr_storage from;
		socklen_t size = sizeof from;
		ssize_t n = recvfrom(s, buffer, sizeof buffer, 0, (struct sockaddr *)&from, &size);

		if (n < 0 || sendto(s, buffer, n, 0, (struct sockaddr *)&from, size) != n)
			warn("udp");
	}
}

static void serve_tcp(int s)
{
	char buffer[512];

	if (listen(s, 64))
		err(1, "listen");
	for (;;) {
		int c = accept(s, NULL, NULL), on = 1;
		ssize_t n;

		if (c < 0)
			err(1, "accept");
		if (setsockopt(c, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on))
			err(1, "TCP_NODELAY");
		while ((n = read(c, buffer, sizeof buffer)) > 0)
			if (write(c, buffer, n) != n)
				break;
		close(c);
	}
}

static void serve(const char *protocol, const char *address, const char *port)
{
	int udp = !strcmp(protocol, "udp"), s;

	parse(address, port);
	s = new_socket(udp ? SOCK_DGRAM : SOCK_STREAM);
	if (bind(s, (struct sockaddr *)&peer, peer_size))
		err(1, "bind");
	if (udp)
		serve_udp(s);
	serve_tcp(s);
}

int main(int argc, char **argv)
{
	if (argc == 5 && !strcmp(argv[1], "serve"))
		serve(argv[2], argv[3], argv[4]);
	if (argc != 7)
		errx(2, "see the source for its arguments");
	parse(argv[2], argv[3]);
	source_port = atoi(argv[4]);
	for (size_t i = 0; i < sizeof workloads / sizeof *workloads; i++) {
		if (!strcmp(argv[1], workloads[i].name)) {
			measure(&workloads[i], atoi(argv[5]), atoi(argv[6]));
			return 0;
		}
	}
	errx(2, "unknown workload %s", argv[1]);
}
