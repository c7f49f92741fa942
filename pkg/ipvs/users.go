package ipvs

import (
	"fmt"
	"os"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// The kernel counts virtual servers of IPv4, and lists only these by an option. To list
// those of IPv6 it goes through all virtual servers again for each page of the answer,
// so that is not asked for where there are none.
//
// Each virtual server of any family and network namespace holds a reference to the
// module ip_vs, and so does each module that uses it; a scheduler holds a second one
// for being registered (register_ip_vs_scheduler). If there are no other references
// than these and one for each virtual server of IPv4, there is no virtual server of
// IPv6. Where another network namespace has virtual servers, or the kernel has IPVS
// built in, nothing can be told.

// moduleDir describes the module.
const moduleDir = "/sys/module/ip_vs/"

// schedulers are the modules that register one scheduler each.
var schedulers = strings.Fields("ip_vs_rr ip_vs_wrr ip_vs_lc ip_vs_wlc ip_vs_fo ip_vs_ovf ip_vs_lblc ip_vs_lblcr ip_vs_dh ip_vs_sh ip_vs_mh ip_vs_sed ip_vs_nq ip_vs_twos")

// onlyIPv4 reports whether it is certain that there are no virtual servers of IPv6. The
// count is read again after the users: between, none is to come or go.
func onlyIPv4(count func() (int, error), users func() (all, modules int, err error)) bool {
	before, err := count()
	if err != nil || before == 0 {
		return false
	}
	all, modules, err := users()
	if err != nil {
		return false
	}
	after, err := count()
	return err == nil && before == after && all == modules+before
}

// moduleUsers counts the references to the module, and those of them that other modules
// hold.
func moduleUsers() (all, modules int, err error) {
	text, err := os.ReadFile(moduleDir + "refcnt")
	if err != nil {
		return 0, 0, err
	}
	if all, err = strconv.Atoi(strings.TrimSpace(string(text))); err != nil {
		return 0, 0, fmt.Errorf("%srefcnt: %q: %w", moduleDir, text, unix.EINVAL)
	}
	holders, err := os.ReadDir(moduleDir + "holders")
	if err != nil {
		return 0, 0, err
	}
	for _, holder := range holders {
		modules++
		if slices.Contains(schedulers, holder.Name()) {
			modules++
		}
	}
	return all, modules, nil
}
