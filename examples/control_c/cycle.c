/* One request of an inference engine against a kvcachefs mount, from lookup to release.
 *
 *   cc -Wall -Wextra -Imount-tools/include examples/control_c/cycle.c -o cycle
 *   ./cycle /mnt/kv qwen3-8b/rank0/3fa9.kv qwen3-8b/rank0/77c1.kv
 *
 * The first process is the scheduler. It starts itself again as the rank that reads: in an engine that is a worker process of
 * its own, which has been told the number of the lease. */
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "kvcachefs.h"

#define RANGES 16

static void die(const char *what, int error) {
    fprintf(stderr, "cycle: %s: %s\n", what, strerror(error));
    exit(1);
}

/* A handle is a session: what is asked for by it goes when it is closed, and so when the process dies. */
static int open_handle(const char *mount) {
    char path[4096];
    snprintf(path, sizeof path, "%s/.ctl/lease", mount);
    int fd = open(path, O_RDWR | O_CLOEXEC);
    if (fd < 0)
        die(path, errno);
    struct kvcachefs_hello hello = {.header = {.version = KVCACHEFS_VERSION}};
    if (ioctl(fd, KVCACHEFS_IOC_HELLO, &hello) < 0)
        die(errno == EPROTO ? "the daemon speaks another version" : "hello", errno);
    return fd;
}

/* Names are sent once, and are numbers from then on. Long lists go by write(2), in the same form. */
static void intern(int fd, char **names, int count, struct kvcachefs_range *ranges) {
    struct {
        struct kvcachefs_intern head;
        char names[8192];
    } request = {.head = {.header = {.version = KVCACHEFS_VERSION, .count = count}}};
    for (int at = 0; at < count; at++) {
        size_t length = strlen(names[at]) + 1;
        if (request.head.bytes + length > sizeof request.names)
            die(names[at], E2BIG);
        memcpy(request.names + request.head.bytes, names[at], length);
        request.head.bytes += length;
    }
    if (ioctl(fd, KVCACHEFS_IOC_INTERN(request.head.bytes), &request) < 0)
        die("intern", errno);
    for (int at = 0; at < count; at++)
        ranges[at] = (struct kvcachefs_range){.id = request.head.first + at,
                                              .generation = request.head.generation,
                                              .kind = KVCACHEFS_KIND_NAME};
}

/* Scheduler: is all of it there? What is not need not be waited for. */
static void lookup(int fd, const struct kvcachefs_range *ranges, int count) {
    struct {
        struct kvcachefs_lookup head;
        struct kvcachefs_range ranges[RANGES];
    } request = {.head = {.header = {.version = KVCACHEFS_VERSION, .count = count}}};
    memcpy(request.ranges, ranges, count * sizeof *ranges);
    if (ioctl(fd, KVCACHEFS_IOC_LOOKUP(count), &request) < 0)
        die("lookup", errno);
    printf("lookup %u of %d\n", request.head.prefix, count);
    if ((int)request.head.prefix < count)
        die("a range is missing, and is computed instead", ENOENT);
}

/* Scheduler: bring it to L1 and keep it there. poll(2) tells when that has happened; an engine polls once for all of its
 * requests, and finds each by the tag. */
static uint64_t acquire(int fd, const struct kvcachefs_range *ranges, int count) {
    struct {
        struct kvcachefs_prefetch head;
        struct kvcachefs_range ranges[RANGES];
    } request = {.head = {.header = {KVCACHEFS_VERSION, KVCACHEFS_PREFETCH_LEASE, count},
                          .tag = 42,
                          .deadline_ms = 30000,
                          .parties = 2}};
    memcpy(request.ranges, ranges, count * sizeof *ranges);
    if (ioctl(fd, KVCACHEFS_IOC_PREFETCH(count), &request) < 0)
        die("prefetch", errno);
    if (request.head.state == KVCACHEFS_TICKET_DENIED)
        die("denied, and computed instead", request.head.status);
    if (request.head.ticket == 0) {
        printf("acquired at once\n");
        return request.head.lease;
    }
    printf("waiting\n");
    struct pollfd wait = {.fd = fd, .events = POLLIN};
    while (poll(&wait, 1, -1) < 0)
        if (errno != EINTR)
            die("poll", errno);
    struct kvcachefs_ticket_state end;
    if (read(fd, &end, sizeof end) != sizeof end)
        die("read", errno ? errno : EIO);
    if (end.state != KVCACHEFS_TICKET_DONE || end.tag != 42)
        die("not brought", end.status);
    printf("acquired\n");
    return end.lease;
}

static void release(int fd, uint64_t lease) {
    struct kvcachefs_lease request = {.header = {.version = KVCACHEFS_VERSION}, .lease = lease};
    if (ioctl(fd, KVCACHEFS_IOC_RELEASE(0), &request) < 0)
        die("release", errno);
}

/* Rank: takes a share of the lease, makes sure that the files it opens are those that are leased, reads, and gives its share
 * back. If it dies meanwhile, that is given back as well. */
static int rank(const char *mount, uint64_t lease, char **names, int count) {
    int fd = open_handle(mount);
    struct kvcachefs_lease attach = {.header = {.version = KVCACHEFS_VERSION}, .lease = lease};
    if (ioctl(fd, KVCACHEFS_IOC_ATTACH, &attach) < 0)
        die("attach", errno);
    struct {
        struct kvcachefs_lease head;
        struct kvcachefs_leased ranges[RANGES];
    } query = {.head = {.header = {.version = KVCACHEFS_VERSION, .count = RANGES}, .lease = lease}};
    if (ioctl(fd, KVCACHEFS_IOC_QUERY(RANGES), &query) < 0)
        die("query", errno);
    unsigned long long bytes = 0;
    for (int at = 0; at < count; at++) {
        char path[4096], buffer[1 << 16];
        snprintf(path, sizeof path, "%s/%s", mount, names[at]);
        int file = open(path, O_RDONLY | O_CLOEXEC);
        if (file < 0)
            die(path, errno);
        struct kvcachefs_id id = {.header = {.version = KVCACHEFS_VERSION}};
        if (ioctl(file, KVCACHEFS_IOC_ID, &id) < 0)
            die(path, errno);
        if (id.node != query.ranges[at].node)
            die("replaced since it was leased", ESTALE);
        for (ssize_t length; (length = read(file, buffer, sizeof buffer)) != 0; bytes += length)
            if (length < 0)
                die(path, errno);
        close(file);
    }
    release(fd, lease);
    printf("rank read %llu bytes\n", bytes);
    return 0;
}

int main(int argc, char **argv) {
    setvbuf(stdout, NULL, _IOLBF, 0);
    if (argc > 4 && strcmp(argv[1], "--rank") == 0)
        return rank(argv[3], strtoull(argv[2], NULL, 10), argv + 4, argc - 4);
    int count = argc - 2;
    if (count < 1 || count > RANGES) {
        fprintf(stderr, "usage: cycle MOUNT NAME... (up to %d, from the root of the mount)\n", RANGES);
        return 1;
    }
    int fd = open_handle(argv[1]);
    struct kvcachefs_range ranges[RANGES];
    intern(fd, argv + 2, count, ranges);
    lookup(fd, ranges, count);
    uint64_t lease = acquire(fd, ranges, count);

    pid_t child = fork();
    if (child == 0) {
        char number[32], *args[RANGES + 5] = {argv[0], "--rank", number, argv[1]};
        snprintf(number, sizeof number, "%llu", (unsigned long long)lease);
        memcpy(args + 4, argv + 2, count * sizeof *args);
        execv("/proc/self/exe", args);
        _exit(127);
    }
    int status;
    if (child < 0 || waitpid(child, &status, 0) < 0 || status != 0)
        die("the rank failed", ECHILD);
    release(fd, lease); /* the second of the two shares: the scheduler's own */
    printf("released\n");
    return 0;
}
