/* An allocator for tensors whose errors show: preloaded, it replaces posix_memalign, which torch takes memory from.

   Every block ends at a page that cannot be touched, and a freed block cannot be touched any more. The bytes of a new
   block are `guard_fill`, so that two runs with different ones tell results that nobody has written. Up to 63 bytes
   between a block and its page, which alignment leaves, are checked when the block is freed. */
#include <errno.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

enum { PAGE = 4096, MARK = 0x77 };
static const size_t PAGES = (size_t)1 << 28, MOST = (size_t)1 << 30;

unsigned char guard_fill = 0x5a;
static unsigned char *region;
static size_t *sizes;
static atomic_size_t next_page;

extern void __libc_free(void *);

__attribute__((constructor)) static void reserve(void) {
    int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
    region = mmap(NULL, PAGES * PAGE, PROT_NONE, flags, -1, 0);
    sizes = mmap(NULL, PAGES * sizeof *sizes, PROT_READ | PROT_WRITE, flags, -1, 0);
    if (region == MAP_FAILED || sizes == MAP_FAILED) abort();
}

int posix_memalign(void **out, size_t alignment, size_t size) {
    if (size > MOST || alignment > PAGE) return ENOMEM;
    if (size == 0) size = 1;
    size_t pages = (size + PAGE - 1) / PAGE, first;
    first = atomic_fetch_add(&next_page, pages + 1);
    if (first + pages + 1 > PAGES) return ENOMEM;
    unsigned char *begin = region + first * PAGE, *end = begin + pages * PAGE;
    if (mprotect(begin, pages * PAGE, PROT_READ | PROT_WRITE)) return ENOMEM;
    unsigned char *block = end - size;
    block -= (uintptr_t)block % alignment;
    memset(begin, MARK, (size_t)(block - begin));
    memset(block, guard_fill, size);
    memset(block + size, MARK, (size_t)(end - block - size));
    sizes[first + (size_t)(block - begin) / PAGE] = size + 1;
    *out = block;
    return 0;
}

void free(void *pointer) {
    unsigned char *block = pointer;
    if (block < region || block >= region + PAGES * PAGE) {
        __libc_free(pointer);
        return;
    }
    size_t page = (size_t)(block - region) / PAGE, size = sizes[page] - 1;
    unsigned char *begin = region + page * PAGE;
    size_t pages = ((size_t)(block - begin) + size + PAGE - 1) / PAGE;
    unsigned char *end = begin + pages * PAGE;
    for (unsigned char *byte = begin; byte < block; byte++)
        if (*byte != MARK) abort();
    for (unsigned char *byte = block + size; byte < end; byte++)
        if (*byte != MARK) abort();
    madvise(begin, pages * PAGE, MADV_DONTNEED);
    mprotect(begin, pages * PAGE, PROT_NONE);
}
