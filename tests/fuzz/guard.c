/* An allocator for tensors whose errors show: preloaded, it replaces posix_memalign, which torch takes memory from.

   Every block ends at a page that cannot be touched, and a freed block cannot be touched any more. The bytes of a new
   block are `guard_fill`, and those around it in its pages are the complement, so that two runs with different ones tell
   results of bytes that nobody has written, or that lie outside. The bytes around a block, of which alignment leaves up
   to 63 behind it, are checked when the block is freed. While `guard_on` is 0 blocks are those of the C library. */
#include <errno.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

enum { PAGE = 4096 };
static const size_t PAGES = (size_t)1 << 28, MOST = (size_t)16 << 20;
static const int FLAGS = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;

/* Of the block that begins in a page. */
typedef struct {
    size_t size;
    unsigned char mark;
} Block;

unsigned char guard_fill = 0x5a, guard_on = 1;
static unsigned char *region;
static Block *blocks;
static atomic_size_t next_page;

extern void *__libc_memalign(size_t, size_t);
extern void __libc_free(void *);

__attribute__((constructor)) static void reserve(void) {
    region = mmap(NULL, PAGES * PAGE, PROT_NONE, FLAGS, -1, 0);
    blocks = mmap(NULL, PAGES * sizeof *blocks, PROT_READ | PROT_WRITE, FLAGS, -1, 0);
    if (region == MAP_FAILED || blocks == MAP_FAILED) abort();
}

int posix_memalign(void **out, size_t alignment, size_t size) {
    if (size > MOST || alignment > PAGE) return ENOMEM;
    if (!guard_on) return (*out = __libc_memalign(alignment, size)) ? 0 : ENOMEM;
    if (size == 0) size = 1;
    size_t pages = (size + PAGE - 1) / PAGE, first;
    first = atomic_fetch_add(&next_page, pages + 1);
    if (first + pages + 1 > PAGES) return ENOMEM;
    unsigned char *begin = region + first * PAGE, *end = begin + pages * PAGE;
    if (mprotect(begin, pages * PAGE, PROT_READ | PROT_WRITE)) return ENOMEM;
    unsigned char *block = end - size, mark = (unsigned char)~guard_fill;
    block -= (uintptr_t)block % alignment;
    memset(begin, mark, (size_t)(block - begin));
    memset(block, guard_fill, size);
    memset(block + size, mark, (size_t)(end - block - size));
    blocks[first + (size_t)(block - begin) / PAGE] = (Block){size, mark};
    *out = block;
    return 0;
}

static void check(const unsigned char *begin, const unsigned char *end, unsigned char mark) {
    unsigned char different = 0;
    for (; begin < end; begin++) different |= *begin ^ mark;
    if (different) abort();
}

void free(void *pointer) {
    unsigned char *block = pointer;
    if (block < region || block >= region + PAGES * PAGE) {
        __libc_free(pointer);
        return;
    }
    size_t page = (size_t)(block - region) / PAGE, size = blocks[page].size;
    unsigned char *begin = region + page * PAGE, mark = blocks[page].mark;
    size_t pages = ((size_t)(block - begin) + size + PAGE - 1) / PAGE;
    unsigned char *end = begin + pages * PAGE;
    check(begin, block, mark);
    check(block + size, end, mark);
    blocks[page].size = 0;
    if (mmap(begin, pages * PAGE, PROT_NONE, FLAGS | MAP_FIXED, -1, 0) == MAP_FAILED) abort();
}
