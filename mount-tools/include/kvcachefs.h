/* The ioctls of kvcachefs: .ctl/lease, .ctl/prefetch, .ctl/drain, and ID on any open file. docs/CONTROL.md explains them.
 *
 * Numbers have the machine's byte order. What is reserved must be zero. A request with items behind it is one piece of
 * memory: the structure, then the items; where the answer has items, they take the same place.
 */
#ifndef KVCACHEFS_H
#define KVCACHEFS_H

#include <stdint.h>
#include <sys/ioctl.h>

#define KVCACHEFS_VERSION 1

#define KVCACHEFS_IOCTL_BYTES_MAX 16383
#define KVCACHEFS_RANGES_MAX 500
#define KVCACHEFS_FORGET_MAX 2000
#define KVCACHEFS_NAMES_BYTES_MAX ((1 << 20) - 4096)
#define KVCACHEFS_COMPONENT_MAX 255
#define KVCACHEFS_NAME_BYTES_MAX 4096

/* kvcachefs_names_header.magic: the four bytes "KVNM" in memory. */
#if __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__
#define KVCACHEFS_NAMES_MAGIC 0x4d4e564bu
#else
#define KVCACHEFS_NAMES_MAGIC 0x4b564e4du
#endif

/* kvcachefs_hello.features */
#define KVCACHEFS_FEATURE_LEASES 1
#define KVCACHEFS_FEATURE_PREFETCH 2
#define KVCACHEFS_FEATURE_DRAIN 4

/* kvcachefs_header.flags */
#define KVCACHEFS_CLASSIFY_LEASE 1
#define KVCACHEFS_RELEASE_ALL_SHARES 1
#define KVCACHEFS_PREFETCH_LEASE 1
#define KVCACHEFS_PREFETCH_ASK 2

/* base_kind */
#define KVCACHEFS_BASE_ROOT 0
#define KVCACHEFS_BASE_NAME 1

/* kvcachefs_range.kind */
#define KVCACHEFS_KIND_NAME 0
#define KVCACHEFS_KIND_NODE 1
#define KVCACHEFS_KIND_ITEM 2

/* kvcachefs_range.unit */
#define KVCACHEFS_UNIT_BYTES 0
#define KVCACHEFS_UNIT_BLOCKS 1

/* tier */
#define KVCACHEFS_TIER_ABSENT 0
#define KVCACHEFS_TIER_L1 1
#define KVCACHEFS_TIER_MIXED 2
#define KVCACHEFS_TIER_L2 3

/* kvcachefs_range_state.flags, kvcachefs_id.state */
#define KVCACHEFS_STATE_DURABLE 1
#define KVCACHEFS_STATE_LEASED 2
#define KVCACHEFS_STATE_OPEN 4
#define KVCACHEFS_STATE_LOADING 8

/* kvcachefs_lease.state */
#define KVCACHEFS_LEASE_GONE 1
#define KVCACHEFS_LEASE_EXPIRED 2

/* kvcachefs_ticket_state.state, kvcachefs_prefetch.state */
#define KVCACHEFS_TICKET_NONE 0
#define KVCACHEFS_TICKET_QUEUED 1
#define KVCACHEFS_TICKET_RUNNING 2
#define KVCACHEFS_TICKET_DONE 3
#define KVCACHEFS_TICKET_DENIED 4
#define KVCACHEFS_TICKET_CANCELLED 5
#define KVCACHEFS_TICKET_FAILED 6

/* kvcachefs_ticket_state.kind */
#define KVCACHEFS_TICKET_PREFETCH 1
#define KVCACHEFS_TICKET_DRAIN 2

struct kvcachefs_header {
    uint16_t version; /* KVCACHEFS_VERSION */
    uint16_t flags;
    uint32_t count; /* items behind the structure */
};

struct kvcachefs_hello {
    struct kvcachefs_header header;
    uint64_t features; /* answers from here on */
    uint32_t names_max;
    uint32_t names_bytes_max;
    uint32_t ranges_max;
    uint32_t leases_max;
    uint64_t lease_bytes_max;
    uint64_t lease_client_bytes_max;
    uint32_t block_bytes;
    uint32_t parties_max;
    uint32_t ttl_default_ms;
    uint32_t ttl_max_ms;
    uint32_t prefetch_window;
    uint32_t prefetch_queue;
    uint64_t prefetch_bytes_max;
    uint32_t tickets_max;
    uint32_t reserved;
};

struct kvcachefs_names {
    struct kvcachefs_header header; /* count is an answer, too */
    uint32_t first;
    uint32_t generation;
};

/* header.count names, each ended by a zero byte, follow in `bytes` bytes. */
struct kvcachefs_intern {
    struct kvcachefs_header header;
    uint32_t base;
    uint32_t base_generation;
    uint32_t bytes;
    uint8_t base_kind;
    uint8_t reserved[3];
    uint32_t first; /* answers */
    uint32_t generation;
};

/* What a write() of names begins with; count names follow in `bytes` bytes. */
struct kvcachefs_names_header {
    uint32_t magic;
    uint16_t version;
    uint8_t base_kind;
    uint8_t reserved;
    uint32_t base;
    uint32_t base_generation;
    uint32_t count;
    uint32_t bytes;
};

/* header.count kvcachefs_slot follow. */
struct kvcachefs_forget {
    struct kvcachefs_header header;
    uint32_t forgotten; /* answer */
    uint32_t reserved;
};

struct kvcachefs_slot {
    uint32_t id;
    uint32_t generation;
};

struct kvcachefs_id {
    struct kvcachefs_header header;
    uint64_t node; /* answers from here on */
    uint64_t size;
    uint8_t state;
    uint8_t reserved[7];
};

/* header.count kvcachefs_range follow; the answer has as many kvcachefs_range_state in their place. */
struct kvcachefs_lookup {
    struct kvcachefs_header header;
    uint64_t generation; /* answers from here on */
    uint32_t prefix;
    uint32_t present;
};

/* Items as of kvcachefs_lookup. */
struct kvcachefs_classify {
    struct kvcachefs_header header;
    uint32_t ttl_ms; /* wanted (0: the default), and given */
    uint32_t parties; /* 0: one */
    uint64_t generation; /* answers from here on */
    uint64_t lease;
    int32_t lease_errno;
    uint8_t tier;
    uint8_t reserved[3];
    uint32_t absent;
    uint32_t failed;
    uint64_t blocks;
    uint64_t blocks_l1;
    uint64_t bytes;
    uint64_t bytes_l1;
};

/* Of EXTEND, RELEASE (header.count kvcachefs_range follow), ATTACH and QUERY (room for header.count kvcachefs_leased
 * follows). */
struct kvcachefs_lease {
    struct kvcachefs_header header;
    uint64_t lease;
    uint32_t ttl_ms; /* wanted by EXTEND (0: the default); what is left */
    uint32_t parties; /* answers from here on */
    uint32_t own;
    uint32_t state;
    uint64_t bytes;
    uint32_t ranges;
    uint32_t reserved;
};

struct kvcachefs_range {
    uint64_t id;
    uint64_t offset;
    uint64_t length; /* 0: to the end */
    uint32_t generation;
    uint8_t kind;
    uint8_t unit;
    uint16_t reserved;
};

struct kvcachefs_range_state {
    int32_t status; /* 0 or a negative errno */
    uint8_t tier;
    uint8_t flags;
    uint16_t reserved;
    uint32_t blocks;
    uint32_t blocks_l1;
    uint64_t bytes;
    uint64_t bytes_l1;
};

struct kvcachefs_leased {
    uint64_t node;
    uint64_t offset;
    uint64_t length;
    uint64_t held;
};

/* Items as of kvcachefs_lookup. */
struct kvcachefs_prefetch {
    struct kvcachefs_header header;
    uint64_t tag;
    uint32_t deadline_ms; /* 0: none */
    uint32_t ttl_ms; /* of the lease: wanted (0: the default), and given */
    uint32_t parties; /* 0: one */
    uint8_t priority; /* what is larger goes first */
    uint8_t reserved[3];
    uint64_t ticket; /* answers from here on */
    uint64_t lease;
    int32_t status; /* an errno: why it is denied, or why no lease was granted */
    uint8_t state;
    uint8_t tier;
    uint16_t reserved_answer;
    uint32_t absent;
    uint32_t failed;
    uint64_t blocks;
    uint64_t blocks_l1;
    uint64_t bytes;
    uint64_t bytes_l1;
    uint64_t bytes_to_read;
    uint32_t ahead;
    uint32_t estimate_ms;
};

/* Items as of kvcachefs_lookup: whole files and directories; none: everything. */
struct kvcachefs_drain {
    struct kvcachefs_header header;
    uint64_t tag;
    uint32_t timeout_ms; /* 0: --drain-timeout */
    uint32_t reserved;
    uint64_t ticket; /* answers from here on */
    uint64_t files;
    uint64_t bytes;
};

/* What read() on the handle gives for each ticket that has ended. */
struct kvcachefs_ticket_state {
    uint64_t ticket;
    uint64_t tag;
    uint64_t lease;
    uint64_t bytes; /* read from the device so far; or drained */
    uint64_t files; /* drained */
    uint64_t failed;
    int32_t status;
    uint8_t state;
    uint8_t kind;
    uint16_t reserved;
    uint32_t ttl_ms;
    uint32_t reserved_end;
};

/* Of CANCEL and TICKET: state.ticket is asked for, the rest is the answer. */
struct kvcachefs_ticket {
    struct kvcachefs_header header;
    struct kvcachefs_ticket_state state;
    uint64_t bytes_total;
    uint32_t ahead;
    uint32_t estimate_ms;
    uint32_t age_ms;
    uint32_t reserved;
};

/* Room for header.count bytes of paths follows, each ended by a zero byte. */
struct kvcachefs_failures {
    struct kvcachefs_header header;
    uint64_t ticket;
    uint32_t from;
    uint32_t count; /* answers from here on */
    uint32_t bytes;
    uint32_t known;
};

/* Command numbers hold the size of the request: of n items, or of n bytes of names. */
#define KVCACHEFS_IOC(number, bytes) _IOC(_IOC_READ | _IOC_WRITE, 'K', number, bytes)
#define KVCACHEFS_IOC_HELLO KVCACHEFS_IOC(1, sizeof(struct kvcachefs_hello))
#define KVCACHEFS_IOC_NAMES KVCACHEFS_IOC(2, sizeof(struct kvcachefs_names))
#define KVCACHEFS_IOC_INTERN(n) KVCACHEFS_IOC(3, sizeof(struct kvcachefs_intern) + (n))
#define KVCACHEFS_IOC_FORGET(n) \
    KVCACHEFS_IOC(4, sizeof(struct kvcachefs_forget) + (n) * sizeof(struct kvcachefs_slot))
#define KVCACHEFS_IOC_ID KVCACHEFS_IOC(5, sizeof(struct kvcachefs_id))
#define KVCACHEFS_IOC_LOOKUP(n) \
    KVCACHEFS_IOC(6, sizeof(struct kvcachefs_lookup) + (n) * sizeof(struct kvcachefs_range))
#define KVCACHEFS_IOC_CLASSIFY(n) \
    KVCACHEFS_IOC(7, sizeof(struct kvcachefs_classify) + (n) * sizeof(struct kvcachefs_range))
#define KVCACHEFS_IOC_EXTEND KVCACHEFS_IOC(8, sizeof(struct kvcachefs_lease))
#define KVCACHEFS_IOC_RELEASE(n) \
    KVCACHEFS_IOC(9, sizeof(struct kvcachefs_lease) + (n) * sizeof(struct kvcachefs_range))
#define KVCACHEFS_IOC_ATTACH KVCACHEFS_IOC(10, sizeof(struct kvcachefs_lease))
#define KVCACHEFS_IOC_QUERY(n) \
    KVCACHEFS_IOC(11, sizeof(struct kvcachefs_lease) + (n) * sizeof(struct kvcachefs_leased))
#define KVCACHEFS_IOC_PREFETCH(n) \
    KVCACHEFS_IOC(12, sizeof(struct kvcachefs_prefetch) + (n) * sizeof(struct kvcachefs_range))
#define KVCACHEFS_IOC_CANCEL KVCACHEFS_IOC(13, sizeof(struct kvcachefs_ticket))
#define KVCACHEFS_IOC_TICKET KVCACHEFS_IOC(14, sizeof(struct kvcachefs_ticket))
#define KVCACHEFS_IOC_DRAIN(n) \
    KVCACHEFS_IOC(15, sizeof(struct kvcachefs_drain) + (n) * sizeof(struct kvcachefs_range))
#define KVCACHEFS_IOC_FAILURES(n) KVCACHEFS_IOC(16, sizeof(struct kvcachefs_failures) + (n))

#endif
